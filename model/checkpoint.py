"""A checkpoint folder in the released layout: checked when opened, read tensor by tensor.

Files are memory-mapped; a worker reads only the tensors it needs. Everything returned is a fresh,
contiguous tensor of its own: nothing keeps the mapping or a bigger buffer alive. This module knows
names and files; the shape of the trees it fills is `model/weight_tree.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from configs.errors import CheckpointError
from model.checkpoint_check import check_tensors
from model.dims import ModelDims
from model.dims_reading import MLA_NORM_EPS, load_config, read_dims
from model.layer_loading import TensorReader, load_globals, load_layer
from model.sizing import (
    ModelSizes,
    compute_sizes,
    loaded_attention_side_bytes,
    loaded_expert_bytes,
)
from model.storage import StorageFormat, read_storage
from model.tensor_files import StoredTensor, TensorFiles, open_tensor_files
from model.tensor_names import expert_prefix, is_vision
from model.weight_tree import AttentionSideWeights, ExpertWeights, PackedMatrix


class Progress(Protocol):
    """Told how loading or writing goes on."""

    def advance(self, num_bytes: int) -> None:
        """Count bytes that are done, of the total that the caller announced."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Headers were read and checked; weights are read by the `load_*` calls.

    Safe to use from one thread; a process opens its own.
    """

    folder: Path
    dims: ModelDims
    storage: StorageFormat
    """Types of the stored tensors; `has_packed_experts` as the files are."""
    num_vision_tensors: int
    """Tensors of the vision tower and projector; they are skipped."""
    stored: dict[str, StoredTensor]
    """Text tensors by canonical name."""
    _files: TensorFiles

    @classmethod
    def open(cls, folder: Path, *, mla_norm_eps: float = MLA_NORM_EPS) -> Checkpoint:
        """Open and check a folder without reading weights.

        Args:
            folder: Holds `config.json` and safetensors files.
            mla_norm_eps: As `read_dims`.

        Raises:
            CheckpointError: The folder is missing, empty, half-written or holds other tensors.
            ModelConfigError: Its config is of a model that is not implemented.
        """
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"checkpoint {folder} is a file; give the folder that holds it")
        config = load_config(folder)
        dims = read_dims(config, mla_norm_eps=mla_norm_eps)
        files = open_tensor_files(folder)
        stored, has_packed_experts = check_tensors(dims, files, folder=str(folder))
        return cls(
            folder=folder,
            dims=dims,
            storage=StorageFormat(read_storage(config).dtype, has_packed_experts),
            num_vision_tensors=sum(is_vision(name) for name in files.tensors),
            stored=stored,
            _files=files,
        )

    def sizes(self) -> ModelSizes:
        """Parameters and bytes, padding and types as the files have them."""
        return compute_sizes(self.dims, self.storage, stored=self.stored)

    def load_attention_side(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> AttentionSideWeights:
        """Load everything but the routed experts.

        Args:
            dtype: Compute dtype; tensors that stay float32 do (`model/weight_tree.py`).
            device: Where the tensors go.
            progress: Advanced by loaded bytes; their sum is `attention_side_bytes(dtype)`.

        Raises:
            CheckpointError: A file cannot be read any more.
        """
        reader = self._reader(dtype, device)
        layers = []
        for layer in range(self.dims.num_layers):
            layers.append(load_layer(reader, self.dims, layer))
            if progress is not None:
                progress.advance(tree_bytes(layers[-1]))
        weights = load_globals(reader, layers=tuple(layers))
        if progress is not None:
            progress.advance(tree_bytes(weights) - tree_bytes(weights.layers))
        return weights

    def load_expert(
        self, layer: int, expert: int, *, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        """Load one routed expert; packed matrices stay packed, others are cast to `dtype`.

        Raises:
            CheckpointError: No such expert, or its file cannot be read any more.
        """
        if layer not in self.dims.moe_layers or not 0 <= expert < self.dims.moe.num_experts:
            raise CheckpointError(
                f"checkpoint {self.folder} has no expert {expert} in layer {layer}; experts are "
                f"0..{self.dims.moe.num_experts - 1} of layers "
                f"{self.dims.num_dense_layers}..{self.dims.num_layers - 1}"
            )
        reader = self._reader(dtype, device)
        prefix = expert_prefix(layer, expert)
        return ExpertWeights(
            gate=self._expert_matrix(reader, prefix + "w1"),
            up=self._expert_matrix(reader, prefix + "w3"),
            down=self._expert_matrix(reader, prefix + "w2"),
        )

    def attention_side_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that `load_attention_side` allocates."""
        return loaded_attention_side_bytes(self.dims, dtype)

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that `load_expert` allocates for any one expert."""
        packed = self.storage.has_packed_experts
        return loaded_expert_bytes(self.dims, dtype, packed=packed)

    def _reader(self, dtype: torch.dtype, device: torch.device) -> TensorReader:
        return TensorReader(self.stored, self._files, dtype, device)

    def _expert_matrix(self, reader: TensorReader, name: str) -> Tensor | PackedMatrix:
        if not self.storage.has_packed_experts:
            return reader.read(f"{name}.weight")
        return PackedMatrix(
            packed=reader.read_bytes(f"{name}.weight_packed"),
            scale=reader.read_bytes(f"{name}.weight_scale"),
        )


def tree_bytes(node: object) -> int:
    """Bytes of all tensors in a tree of dataclasses and tuples."""
    if isinstance(node, Tensor):
        return node.numel() * node.element_size()
    if isinstance(node, tuple):
        return sum(tree_bytes(child) for child in node)
    if is_dataclass(node):
        return sum(tree_bytes(getattr(node, field.name)) for field in fields(node))
    return 0
