"""The tensors a checkpoint must hold: names, shapes and data types, from `ModelDims` alone.

The reader checks files against this, the writer writes from it and sizes are sums over it. Names
are canonical: without the `language_model.` prefix, and with the released `*_res_proj.weight`
spelling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from model.dims import LayerKind, ModelDims
from model.storage import MXFP4_GROUP

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
EXPERT_MARK = ".block_sparse_moe.experts."
"""Only tensors of routed experts have this in their name."""

_OLD_SPELLINGS = {
    "_res.proj_weight": "_res_proj.weight",
    "_res.norm_weight": "_res_norm.weight",
}


class StoredType(StrEnum):
    """Which data types a tensor may have in a file."""

    COMPUTE = "compute"
    """bfloat16 as released; float32 in exact copies."""
    FLOAT32 = "float32"
    """float32 as released, whatever the rest is; a bfloat16 copy is read too."""
    BYTES = "bytes"
    """uint8 codes."""

    @property
    def safetensors_names(self) -> tuple[str, ...]:
        """Allowed `dtype` strings of a safetensors header."""
        return ("U8",) if self is StoredType.BYTES else ("BF16", "F32")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a file must hold under one name."""

    shape: tuple[int, ...]
    stored: StoredType = StoredType.COMPUTE
    may_be_longer: bool = False
    """The first dimension may be padded (A_log only)."""

    @property
    def num_values(self) -> int:
        """Values in the unpadded tensor."""
        return math.prod(self.shape)


def canonical_name(name: str) -> str:
    """Return the name without prefix and in the released spelling."""
    name = name.removeprefix(TEXT_PREFIX)
    if "_res." not in name:
        return name
    for old, new in _OLD_SPELLINGS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def is_vision(name: str) -> bool:
    """Whether a stored name belongs to the vision tower or its projector."""
    return name.startswith(VISION_PREFIXES)


def layer_prefix(layer: int) -> str:
    """What the names of a layer start with."""
    return f"model.layers.{layer}."


def expert_prefix(layer: int, expert: int) -> str:
    """What the names of a routed expert start with."""
    return f"model.layers.{layer}{EXPERT_MARK}{expert}."


def attention_side_tensors(dims: ModelDims) -> dict[str, TensorSpec]:
    """Every tensor of the attention side: all but the routed experts."""
    tensors: dict[str, TensorSpec] = {}
    for layer in range(dims.num_layers):
        tensors.update(layer_tensors(dims, layer))
    tensors.update(global_tensors(dims))
    return tensors


def global_tensors(dims: ModelDims) -> dict[str, TensorSpec]:
    """Embedding, final norm and mix, head."""
    hidden = dims.hidden_size
    return {
        "model.embed_tokens.weight": TensorSpec((dims.vocab_size, hidden)),
        "model.norm.weight": TensorSpec((hidden,)),
        "model.output_attn_res_norm.weight": TensorSpec((hidden,)),
        "model.output_attn_res_proj.weight": TensorSpec((1, hidden)),
        "lm_head.weight": TensorSpec((dims.vocab_size, hidden)),
    }


def layer_tensors(dims: ModelDims, layer: int) -> dict[str, TensorSpec]:
    """Attention-side tensors of one layer."""
    hidden = dims.hidden_size
    tensors = {
        "input_layernorm.weight": TensorSpec((hidden,)),
        "post_attention_layernorm.weight": TensorSpec((hidden,)),
        "self_attention_res_norm.weight": TensorSpec((hidden,)),
        "self_attention_res_proj.weight": TensorSpec((1, hidden)),
        "mlp_res_norm.weight": TensorSpec((hidden,)),
        "mlp_res_proj.weight": TensorSpec((1, hidden)),
    }
    is_kda = dims.layer_kinds[layer] is LayerKind.KDA
    attention = _kda_tensors(dims) if is_kda else _mla_tensors(dims)
    tensors.update(_prefixed("self_attn.", attention))
    if layer < dims.num_dense_layers:
        tensors.update(_prefixed("mlp.", _glu_tensors(hidden, dims.dense_hidden_size)))
    else:
        tensors.update(_prefixed("block_sparse_moe.", _moe_tensors(dims)))
    return _prefixed(layer_prefix(layer), tensors)


def expert_tensors(
    dims: ModelDims, layer: int, expert: int, *, packed: bool
) -> dict[str, TensorSpec]:
    """Tensors of one routed expert, MXFP4-packed or dense."""
    return _prefixed(expert_prefix(layer, expert), expert_specs(dims, packed=packed))


def expert_specs(dims: ModelDims, *, packed: bool) -> dict[str, TensorSpec]:
    """Tensors that every routed expert has, by the ends of their names."""
    specs: dict[str, TensorSpec] = {}
    for matrix, (rows, columns) in expert_matrices(dims).items():
        if packed:
            scales = columns // MXFP4_GROUP
            specs[f"{matrix}.weight_packed"] = TensorSpec((rows, columns // 2), StoredType.BYTES)
            specs[f"{matrix}.weight_scale"] = TensorSpec((rows, scales), StoredType.BYTES)
        else:
            specs[f"{matrix}.weight"] = TensorSpec((rows, columns))
    return specs


def expert_matrices(dims: ModelDims) -> dict[str, tuple[int, int]]:
    """Logical `[out, in]` of the matrices of one routed expert: gate, down and up."""
    latent, inner = dims.moe.latent_size, dims.moe.expert_hidden_size
    return {"w1": (inner, latent), "w2": (latent, inner), "w3": (inner, latent)}


def _prefixed(prefix: str, tensors: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {prefix + name: spec for name, spec in tensors.items()}


def _kda_tensors(dims: ModelDims) -> dict[str, TensorSpec]:
    kda, hidden = dims.kda, dims.hidden_size
    inner = kda.inner_size
    tensors: dict[str, TensorSpec] = {}
    for part in ("q", "k", "v"):
        tensors[f"{part}_proj.weight"] = TensorSpec((inner, hidden))
        tensors[f"{part}_conv1d.weight"] = TensorSpec(
            (inner, 1, kda.conv_kernel_size), StoredType.FLOAT32
        )
    return tensors | {
        "f_a_proj.weight": TensorSpec((kda.head_dim, hidden)),
        "f_b_proj.weight": TensorSpec((inner, kda.head_dim)),
        "dt_bias": TensorSpec((inner,), StoredType.FLOAT32),
        # Stored padded in the release: 128 entries for 96 heads.
        "A_log": TensorSpec((kda.num_heads,), StoredType.FLOAT32, may_be_longer=True),
        "b_proj.weight": TensorSpec((kda.num_heads, hidden)),
        "g_proj.weight": TensorSpec((inner, hidden)),
        "o_norm.weight": TensorSpec((kda.head_dim,), StoredType.FLOAT32),
        "o_proj.weight": TensorSpec((hidden, inner)),
    }


def _mla_tensors(dims: ModelDims) -> dict[str, TensorSpec]:
    mla, hidden = dims.mla, dims.hidden_size
    query_rows = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    value_rows = mla.num_heads * mla.v_head_dim
    key_value_rows = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if mla.q_lora_rank is None:
        query = {"q_proj.weight": TensorSpec((query_rows, hidden))}
    else:
        query = {
            "q_a_proj.weight": TensorSpec((mla.q_lora_rank, hidden)),
            "q_a_layernorm.weight": TensorSpec((mla.q_lora_rank,)),
            "q_b_proj.weight": TensorSpec((query_rows, mla.q_lora_rank)),
        }
    return query | {
        "kv_a_proj_with_mqa.weight": TensorSpec((mla.cache_width, hidden)),
        "kv_a_layernorm.weight": TensorSpec((mla.kv_lora_rank,)),
        "kv_b_proj.weight": TensorSpec((key_value_rows, mla.kv_lora_rank)),
        "g_proj.weight": TensorSpec((value_rows, hidden)),
        "o_proj.weight": TensorSpec((hidden, value_rows)),
    }


def _glu_tensors(hidden: int, inner: int) -> dict[str, TensorSpec]:
    return {
        "gate_proj.weight": TensorSpec((inner, hidden)),
        "up_proj.weight": TensorSpec((inner, hidden)),
        "down_proj.weight": TensorSpec((hidden, inner)),
    }


def _moe_tensors(dims: ModelDims) -> dict[str, TensorSpec]:
    moe, hidden = dims.moe, dims.hidden_size
    tensors = {
        "gate.weight": TensorSpec((moe.num_experts, hidden)),
        "gate.e_score_correction_bias": TensorSpec((moe.num_experts,), StoredType.FLOAT32),
        "routed_expert_down_proj.weight": TensorSpec((moe.latent_size, hidden)),
        "routed_expert_up_proj.weight": TensorSpec((hidden, moe.latent_size)),
    }
    if moe.has_latent_norm:
        tensors["routed_expert_norm.weight"] = TensorSpec((moe.latent_size,))
    if moe.num_shared_experts:
        shared = _glu_tensors(hidden, moe.shared_hidden_size)
        tensors.update(_prefixed("shared_experts.", shared))
    return tensors
