"""Fills the trees of `model/weight_tree.py` from stored tensors, layer by layer.

Fusing and folding happen here, once: q, k and v stacked, kv_b split into keys and values, AttnRes
norm and projection multiplied, the padding of A_log cut and exp applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.dims import LayerKind, ModelDims
from model.tensor_files import StoredTensor, TensorFiles
from model.tensor_names import layer_prefix
from model.weight_tree import (
    AttentionSideWeights,
    GluWeights,
    KdaWeights,
    LatentMoeWeights,
    LayerWeights,
    MlaWeights,
)


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads tensors by canonical name into fresh memory of one dtype and device."""

    stored: Mapping[str, StoredTensor]
    files: TensorFiles
    dtype: torch.dtype
    device: torch.device

    def read(self, name: str, *, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor, contiguous, in `dtype` (compute dtype by default)."""
        return self.copy(self.mapped(name), dtype=dtype)

    def read_bytes(self, name: str) -> Tensor:
        """Return a uint8 tensor as stored."""
        return self.copy(self.mapped(name), dtype=torch.uint8)

    def read_float32(self, name: str) -> Tensor:
        """Return the tensor in float32, whatever the compute dtype is."""
        return self.copy(self.mapped(name), dtype=torch.float32)

    def mapped(self, name: str) -> Tensor:
        """Return the stored tensor; it aliases the mapped file and must not be kept."""
        return self.files.read(self.stored[name].name)

    def copy(self, source: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """Copy into memory of its own, so that no mapping or bigger buffer stays referenced."""
        target = torch.empty(
            source.shape, dtype=self.dtype if dtype is None else dtype, device=self.device
        )
        return target.copy_(source)


def load_layer(reader: TensorReader, dims: ModelDims, layer: int) -> LayerWeights:
    """Load the attention side of one layer."""
    prefix = layer_prefix(layer)
    attention: KdaWeights | MlaWeights
    if dims.layer_kinds[layer] is LayerKind.KDA:
        attention = _load_kda(reader, dims, prefix + "self_attn.")
    else:
        attention = _load_mla(reader, dims, prefix + "self_attn.")
    mlp: GluWeights | LatentMoeWeights
    if layer < dims.num_dense_layers:
        mlp = _load_glu(reader, prefix + "mlp.")
    else:
        mlp = _load_moe(reader, dims, prefix + "block_sparse_moe.")
    return LayerWeights(
        attention_mix=_load_mix(reader, prefix + "self_attention_res"),
        mlp_mix=_load_mix(reader, prefix + "mlp_res"),
        input_norm=reader.read(prefix + "input_layernorm.weight"),
        post_attention_norm=reader.read(prefix + "post_attention_layernorm.weight"),
        attention=attention,
        mlp=mlp,
    )


def load_globals(reader: TensorReader, *, layers: tuple[LayerWeights, ...]) -> AttentionSideWeights:
    """Load embedding, final norm and mix and head, around loaded layers."""
    return AttentionSideWeights(
        embedding=reader.read("model.embed_tokens.weight"),
        layers=layers,
        output_mix=_load_mix(reader, "model.output_attn_res"),
        final_norm=reader.read("model.norm.weight"),
        lm_head=reader.read("lm_head.weight"),
    )


def _load_mix(reader: TensorReader, name: str) -> Tensor:
    """Fold an AttnRes norm weight and projection into one float32 vector `[hidden]`."""
    norm = reader.read_float32(f"{name}_norm.weight")
    return norm.mul_(reader.read_float32(f"{name}_proj.weight").squeeze(0))


def _load_kda(reader: TensorReader, dims: ModelDims, prefix: str) -> KdaWeights:
    inner, hidden, taps = dims.kda.inner_size, dims.hidden_size, dims.kda.conv_kernel_size
    qkv_proj = torch.empty(3 * inner, hidden, dtype=reader.dtype, device=reader.device)
    conv = torch.empty(3 * inner, taps, dtype=torch.float32, device=reader.device)
    for index, part in enumerate("qkv"):
        rows = slice(index * inner, (index + 1) * inner)
        qkv_proj[rows].copy_(reader.mapped(f"{prefix}{part}_proj.weight"))
        conv[rows].copy_(reader.mapped(f"{prefix}{part}_conv1d.weight").squeeze(1))
    # One entry per head; what follows is padding, whose length equals head_dim by coincidence.
    decay_log = reader.mapped(prefix + "A_log")[: dims.kda.num_heads]
    return KdaWeights(
        qkv_proj=qkv_proj,
        conv=conv,
        decay_down_proj=reader.read(prefix + "f_a_proj.weight"),
        decay_up_proj=reader.read(prefix + "f_b_proj.weight"),
        decay_bias=reader.read_float32(prefix + "dt_bias"),
        decay_rate=reader.copy(decay_log, dtype=torch.float32).exp_(),
        beta_proj=reader.read(prefix + "b_proj.weight"),
        gate_proj=reader.read(prefix + "g_proj.weight"),
        out_norm=reader.read_float32(prefix + "o_norm.weight"),
        out_proj=reader.read(prefix + "o_proj.weight"),
    )


def _load_mla(reader: TensorReader, dims: ModelDims, prefix: str) -> MlaWeights:
    mla = dims.mla
    has_bottleneck = mla.q_lora_rank is not None
    key_value = reader.mapped(prefix + "kv_b_proj.weight").view(
        mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank
    )
    q_up_name = "q_b_proj.weight" if has_bottleneck else "q_proj.weight"
    return MlaWeights(
        q_down_proj=reader.read(prefix + "q_a_proj.weight") if has_bottleneck else None,
        q_down_norm=reader.read(prefix + "q_a_layernorm.weight") if has_bottleneck else None,
        q_up_proj=reader.read(prefix + q_up_name),
        kv_down_proj=reader.read(prefix + "kv_a_proj_with_mqa.weight"),
        kv_down_norm=reader.read(prefix + "kv_a_layernorm.weight"),
        k_up_proj=reader.copy(key_value[:, : mla.qk_nope_head_dim]),
        v_up_proj=reader.copy(key_value[:, mla.qk_nope_head_dim :]),
        gate_proj=reader.read(prefix + "g_proj.weight"),
        out_proj=reader.read(prefix + "o_proj.weight"),
    )


def _load_glu(reader: TensorReader, prefix: str) -> GluWeights:
    return GluWeights(
        gate_proj=reader.read(prefix + "gate_proj.weight"),
        up_proj=reader.read(prefix + "up_proj.weight"),
        down_proj=reader.read(prefix + "down_proj.weight"),
    )


def _load_moe(reader: TensorReader, dims: ModelDims, prefix: str) -> LatentMoeWeights:
    moe = dims.moe
    norm_name = prefix + "routed_expert_norm.weight"
    shared_prefix = prefix + "shared_experts."
    return LatentMoeWeights(
        router=reader.read_float32(prefix + "gate.weight"),
        selection_bias=reader.read_float32(prefix + "gate.e_score_correction_bias"),
        down_proj=reader.read(prefix + "routed_expert_down_proj.weight"),
        latent_norm=reader.read(norm_name) if moe.has_latent_norm else None,
        up_proj=reader.read(prefix + "routed_expert_up_proj.weight"),
        shared=_load_glu(reader, shared_prefix) if moe.num_shared_experts else None,
    )
