"""Writes checkpoints of random weights in the released layout, for tests, benchmarks and the demo.

A tensor's values depend on the seed and its name only: the same model can be written with and
without prefix, sharded or not, packed or dense (packed experts are the rounded dense ones). Scales
are chosen so that logits are well spread and greedy tokens are not decided by rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from configs.errors import CheckpointError
from configs.numerics import FloatType
from model.checkpoint import Progress
from model.checkpoint_spec import CheckpointSpec, make_config
from model.dims import LayerKind, ModelDims
from model.dims_reading import CONFIG_FILE
from model.mxfp4 import quantize
from model.tensor_file_writing import TensorGroup, TensorHeader, write_tensor_file
from model.tensor_files import INDEX_FILE, SINGLE_FILE
from model.tensor_names import (
    TEXT_PREFIX,
    StoredType,
    TensorSpec,
    expert_matrices,
    expert_prefix,
    expert_tensors,
    global_tensors,
    layer_tensors,
)
from model.tokenizer_files import write_tokenizer_files

_VISION_SHAPES = {
    "vision_tower.patch_embed.proj.weight": (8, 3, 14, 14),
    "vision_tower.encoder.final_layernorm.weight": (8,),
    "mm_projector.proj.0.weight": (32, 32),
}
_TORCH_DTYPES = {FloatType.FLOAT32: torch.float32, FloatType.BFLOAT16: torch.bfloat16}


def write_checkpoint(
    folder: Path, spec: CheckpointSpec, *, seed: int, progress: Progress | None = None
) -> None:
    """Write a checkpoint; the folder appears whole or not at all.

    Args:
        folder: Must not exist, or be empty. Its parent is created.
        spec: Shape and variant.
        seed: Of all weights.
        progress: Advanced by written bytes; their sum is `checkpoint_bytes(spec)`.

    Raises:
        CheckpointError: The folder holds something, or the disk refuses.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; remove it or choose another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            partial_folder.chmod(0o755)
            _write_files(partial_folder, spec, seed=seed, progress=progress)
            partial_folder.rename(folder)
        except BaseException:
            shutil.rmtree(partial_folder, ignore_errors=True)
            raise
    except OSError as exc:
        raise CheckpointError(f"{folder} cannot be written: {exc}") from exc


def checkpoint_bytes(spec: CheckpointSpec) -> int:
    """Bytes of all tensors of a spec."""
    return sum(
        header.num_bytes
        for groups in _shards(spec, seed=0)
        for group in groups
        for header in group.headers
    )


def _write_files(
    folder: Path, spec: CheckpointSpec, *, seed: int, progress: Progress | None
) -> None:
    def on_written(num_bytes: int) -> None:
        if progress is not None:
            progress.advance(num_bytes)

    shards = list(_shards(spec, seed=seed))
    if spec.is_sharded:
        weight_map: dict[str, str] = {}
        for number, groups in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
            write_tensor_file(folder / name, groups, on_written)
            weight_map.update((header.name, name) for group in groups for header in group.headers)
        index = {"metadata": {"total_size": checkpoint_bytes(spec)}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=1), encoding="utf-8")
    else:
        groups = [group for shard in shards for group in shard]
        write_tensor_file(folder / SINGLE_FILE, groups, on_written)
    (folder / CONFIG_FILE).write_text(json.dumps(make_config(spec), indent=1), encoding="utf-8")
    if spec.has_tokenizer:
        write_tokenizer_files(folder)


def _shards(spec: CheckpointSpec, *, seed: int) -> Iterator[list[TensorGroup]]:
    """Tensors as they go into the files of a sharded checkpoint: layer by layer, then the rest."""
    dims = spec.dims
    for layer in range(dims.num_layers):
        groups = [
            _plain_group(spec, name, tensor, seed)
            for name, tensor in layer_tensors(dims, layer).items()
        ]
        if layer in dims.moe_layers:
            for expert in range(dims.moe.num_experts):
                groups.extend(_expert_groups(spec, layer, expert, seed))
        yield groups
    rest = [_plain_group(spec, name, tensor, seed) for name, tensor in global_tensors(dims).items()]
    if spec.has_vision:
        rest.extend(_vision_groups(spec, seed))
    yield rest


def _plain_group(spec: CheckpointSpec, name: str, tensor: TensorSpec, seed: int) -> TensorGroup:
    shape = (spec.stored_a_log_length,) if tensor.may_be_longer else tensor.shape
    is_float32 = tensor.stored is StoredType.FLOAT32
    dtype = torch.float32 if is_float32 else _TORCH_DTYPES[spec.storage.dtype]

    def make() -> tuple[Tensor]:
        values = _make_values(spec.dims, name, tensor.shape, seed)
        if shape != tensor.shape:
            values = torch.cat([values, values.new_zeros(shape[0] - tensor.shape[0])])
        return (values.to(dtype),)

    return TensorGroup((TensorHeader(_stored_name(spec, name), dtype, shape),), make)


def _expert_groups(
    spec: CheckpointSpec, layer: int, expert: int, seed: int
) -> Iterator[TensorGroup]:
    tensors = expert_tensors(spec.dims, layer, expert, packed=spec.storage.has_packed_experts)
    if not spec.storage.has_packed_experts:
        for name, tensor in tensors.items():
            yield _plain_group(spec, name, tensor, seed)
        return
    for matrix, shape in expert_matrices(spec.dims).items():
        base = f"{expert_prefix(layer, expert)}{matrix}."
        headers = tuple(
            TensorHeader(_stored_name(spec, name), torch.uint8, tensors[name].shape)
            for name in (base + "weight_packed", base + "weight_scale")
        )
        yield TensorGroup(headers, partial(_make_packed, spec, f"{base}weight", shape, seed))


def _make_packed(
    spec: CheckpointSpec, name: str, shape: tuple[int, int], seed: int
) -> tuple[Tensor, Tensor]:
    matrix = quantize(_make_values(spec.dims, name, shape, seed))
    return matrix.packed, matrix.scale


def _vision_groups(spec: CheckpointSpec, seed: int) -> Iterator[TensorGroup]:
    dtype = _TORCH_DTYPES[spec.storage.dtype]
    for name, shape in _VISION_SHAPES.items():
        yield TensorGroup(
            (TensorHeader(name, dtype, shape),),
            partial(_make_vision, spec.dims, name, shape, seed, dtype),
        )


def _make_vision(
    dims: ModelDims, name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> tuple[Tensor]:
    return (_make_values(dims, name, shape, seed).to(dtype),)


def _stored_name(spec: CheckpointSpec, name: str) -> str:
    return TEXT_PREFIX + name if spec.has_prefix else name


def _make_values(dims: ModelDims, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Float32 values of one tensor, by its canonical name."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    if name.endswith("A_log"):
        return torch.log(torch.rand(shape, generator=generator) * 3 + 0.2)
    values = torch.randn(shape, generator=generator)
    if name.endswith(("norm.weight", "layernorm.weight")):
        return values.mul_(0.2).add_(1.0)
    return values.mul_(_scale(dims, name, shape))


def _scale(dims: ModelDims, name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a tensor: by fan-in, sharper where a softmax or a choice follows."""
    fan_in = 1 / math.sqrt(shape[-1])
    fixed = {"embed_tokens.weight": 1.0, "conv1d.weight": 0.5, "dt_bias": 0.5}
    fixed |= {"e_score_correction_bias": 0.1, "_res_proj.weight": 2 * fan_in}
    fixed |= {"block_sparse_moe.gate.weight": 1.5 * fan_in, "q_b_proj.weight": 2 * fan_in}
    for ending, scale in fixed.items():
        if name.endswith(ending):
            return scale
    is_query = name.endswith("self_attn.q_proj.weight")
    if is_query and dims.layer_kinds[int(name.split(".")[2])] is LayerKind.MLA:
        return 2 * fan_in
    return fan_in
