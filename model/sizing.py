"""Parameters, bytes and per-token sizes of a model, from its shape alone.

Everything is a sum over the expected tensors of `model/tensor_names.py`; nothing is measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from configs.numerics import FloatType
from model.dims import ModelDims
from model.storage import MXFP4_GROUP, StorageFormat
from model.tensor_files import StoredTensor
from model.tensor_names import (
    EXPERT_MARK,
    StoredType,
    TensorSpec,
    attention_side_tensors,
    expert_matrices,
)

_KV_BYTES_PER_VALUE = FloatType.BFLOAT16.num_bytes

EMBEDDING = "embedding"
ROUTED_EXPERTS = "routed experts"

_COMPONENT_MARKS = (
    ("embed_tokens", EMBEDDING),
    ("lm_head", "lm_head"),
    ("_res_norm", "norms and AttnRes vectors"),
    ("_res_proj", "norms and AttnRes vectors"),
    ("input_layernorm", "norms and AttnRes vectors"),
    ("post_attention_layernorm", "norms and AttnRes vectors"),
    ("model.norm", "norms and AttnRes vectors"),
    ("shared_experts", "shared experts"),
    ("routed_expert_norm", "latent projections"),
    ("routed_expert_", "latent projections"),
    (".block_sparse_moe.gate.", "router"),
    (".mlp.", "dense MLP"),
)


@dataclass(frozen=True, slots=True)
class ComponentSize:
    """One line of the parameter table."""

    name: str
    num_parameters: int
    num_bytes: int
    """As stored in the checkpoint."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a text model. Bytes are as stored, unless a field says otherwise."""

    components: tuple[ComponentSize, ...]
    """Largest first; together every text tensor once."""
    num_parameters: int
    """Text parameters, padding of A_log included as in the released count."""
    num_active_parameters: int
    """Read for one token, the embedding table left out (one row of it is read)."""
    routed_expert_bytes: int
    attention_side_bytes: int
    """Everything but the routed experts."""
    bytes_per_expert: int
    kv_bytes_per_token: int
    """MLA cache over all layers, bfloat16."""
    kda_state_bytes_per_request: int
    """Recurrent state over all KDA layers, float32; any length."""
    conv_state_bytes_per_request: int
    """Convolution history over all KDA layers, bfloat16."""
    boundary_bytes_per_token: int
    """One latent in bfloat16: per token, MoE layer and direction, for one expert worker."""


def compute_sizes(
    dims: ModelDims,
    storage: StorageFormat,
    *,
    stored: Mapping[str, StoredTensor] | None = None,
) -> ModelSizes:
    """Compute the sizes of a model.

    Args:
        dims: The shape.
        storage: Types of the stored tensors.
        stored: Tensors by canonical name where files are at hand: their padding and types count.
            Otherwise those of the release are assumed.
    """
    components = _count_components(dims, storage, stored)
    routed = components.get(ROUTED_EXPERTS, ComponentSize(ROUTED_EXPERTS, 0, 0))
    num_parameters = sum(component.num_parameters for component in components.values())
    moe = dims.moe
    num_experts = len(dims.moe_layers) * moe.num_experts
    idle_experts = moe.num_experts - moe.num_experts_per_token
    idle = len(dims.moe_layers) * idle_experts * _expert_parameters(dims)
    kda = dims.kda
    conv_values = (kda.conv_kernel_size - 1) * 3 * kda.inner_size
    return ModelSizes(
        components=tuple(
            sorted(components.values(), key=lambda component: -component.num_parameters)
        ),
        num_parameters=num_parameters,
        num_active_parameters=num_parameters - idle - components[EMBEDDING].num_parameters,
        routed_expert_bytes=routed.num_bytes,
        attention_side_bytes=sum(component.num_bytes for component in components.values())
        - routed.num_bytes,
        bytes_per_expert=routed.num_bytes // num_experts if num_experts else 0,
        kv_bytes_per_token=len(dims.mla_layers) * dims.mla.cache_width * _KV_BYTES_PER_VALUE,
        kda_state_bytes_per_request=len(dims.kda_layers)
        * kda.num_heads
        * kda.head_dim
        * kda.head_dim
        * FloatType.FLOAT32.num_bytes,
        conv_state_bytes_per_request=len(dims.kda_layers)
        * conv_values
        * FloatType.BFLOAT16.num_bytes,
        boundary_bytes_per_token=moe.latent_size * FloatType.BFLOAT16.num_bytes,
    )


def released_a_log_length(dims: ModelDims) -> int:
    """Length of A_log in the release: 128 for 96 heads, which is also its head width."""
    return max(dims.kda.num_heads, dims.kda.head_dim)


def loaded_attention_side_bytes(dims: ModelDims, dtype: torch.dtype) -> int:
    """Bytes of `AttentionSideWeights` in memory in a compute dtype."""
    total = 0
    for name, spec in attention_side_tensors(dims).items():
        if name.endswith("_res_proj.weight"):
            continue  # folded into the norm of the same mix
        stays_float32 = spec.stored is StoredType.FLOAT32 or name.endswith(
            ("_res_norm.weight", ".gate.weight")
        )
        total += spec.num_values * (4 if stays_float32 else dtype.itemsize)
    return total


def loaded_expert_bytes(dims: ModelDims, dtype: torch.dtype, *, packed: bool) -> int:
    """Bytes of one `ExpertWeights` in memory."""
    if packed:
        return _packed_expert_bytes(dims)
    return _expert_parameters(dims) * dtype.itemsize


def _count_components(
    dims: ModelDims, storage: StorageFormat, stored: Mapping[str, StoredTensor] | None
) -> dict[str, ComponentSize]:
    parameters: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for name, spec in attention_side_tensors(dims).items():
        component = _component(dims, name)
        if stored is not None:
            parameters[component] += stored[name].num_values
            num_bytes[component] += stored[name].num_bytes
        else:
            values = released_a_log_length(dims) if spec.may_be_longer else spec.num_values
            parameters[component] += values
            num_bytes[component] += values * _stored_item_bytes(spec, storage)
    num_experts = len(dims.moe_layers) * dims.moe.num_experts
    if num_experts:
        parameters[ROUTED_EXPERTS] = num_experts * _expert_parameters(dims)
        num_bytes[ROUTED_EXPERTS] = (
            num_experts * _stored_expert_bytes(dims, storage)
            if stored is None
            else sum(tensor.num_bytes for name, tensor in stored.items() if EXPERT_MARK in name)
        )
    return {
        component: ComponentSize(component, values, num_bytes[component])
        for component, values in parameters.items()
    }


def _component(dims: ModelDims, name: str) -> str:
    for mark, component in _COMPONENT_MARKS:
        if mark in name:
            return component
    layer = int(name.split(".")[2])
    return f"{dims.layer_kinds[layer].value.upper()} attention"


def _stored_item_bytes(spec: TensorSpec, storage: StorageFormat) -> int:
    return 4 if spec.stored is StoredType.FLOAT32 else storage.dtype.num_bytes


def _expert_parameters(dims: ModelDims) -> int:
    return sum(math.prod(shape) for shape in expert_matrices(dims).values())


def _packed_expert_bytes(dims: ModelDims) -> int:
    return sum(
        rows * (columns // 2 + columns // MXFP4_GROUP)
        for rows, columns in expert_matrices(dims).values()
    )


def _stored_expert_bytes(dims: ModelDims, storage: StorageFormat) -> int:
    if storage.has_packed_experts:
        return _packed_expert_bytes(dims)
    return _expert_parameters(dims) * storage.dtype.num_bytes
