"""The weights of a model as frozen trees of tensors, named as the code uses them.

`model/checkpoint.py` fills these from files; the decoder and the expert FFN read them. Matrices are
`[out, in]` and in compute dtype unless a field says float32. Nobody mutates them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KdaWeights:
    """One KDA attention. HD = heads x head width."""

    qkv_proj: Tensor
    """`[3 HD, hidden]`: q rows, then k, then v."""
    conv: Tensor
    """float32 `[3 HD, taps]`, rows as `qkv_proj`; the last tap meets the current token."""
    decay_down_proj: Tensor
    """`f_a_proj` `[head width, hidden]`."""
    decay_up_proj: Tensor
    """`f_b_proj` `[HD, head width]`."""
    decay_bias: Tensor
    """`dt_bias`, float32 `[HD]`, head-major."""
    decay_rate: Tensor
    """`exp(A_log)` of the real heads, float32 `[heads]`; the padding of A_log is cut."""
    beta_proj: Tensor
    """`b_proj` `[heads, hidden]`."""
    gate_proj: Tensor
    """`g_proj` `[HD, hidden]`."""
    out_norm: Tensor
    """float32 `[head width]`, shared by all heads."""
    out_proj: Tensor
    """`[hidden, HD]`."""


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """One gated MLA attention."""

    q_down_proj: Tensor | None
    """`q_a_proj` `[q rank, hidden]`; None without a query bottleneck."""
    q_down_norm: Tensor | None
    q_up_proj: Tensor
    """`q_b_proj` `[heads (nope + rope), q rank]`; without a bottleneck `q_proj` `[.., hidden]`."""
    kv_down_proj: Tensor
    """`kv_a_proj_with_mqa` `[kv rank + rope, hidden]`."""
    kv_down_norm: Tensor
    """`[kv rank]`."""
    k_up_proj: Tensor
    """`[heads, nope, kv rank]`: the key rows of `kv_b_proj`."""
    v_up_proj: Tensor
    """`[heads, v width, kv rank]`: the value rows of `kv_b_proj`."""
    gate_proj: Tensor
    """`g_proj` `[heads x v width, hidden]`."""
    out_proj: Tensor
    """`[hidden, heads x v width]`."""


@dataclass(frozen=True, slots=True)
class GluWeights:
    """A SiTU MLP at full width: a dense layer or the shared experts."""

    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor


@dataclass(frozen=True, slots=True)
class LatentMoeWeights:
    """The attention side of a Stable LatentMoE: everything but the routed experts."""

    router: Tensor
    """float32 `[experts, hidden]`."""
    selection_bias: Tensor
    """`e_score_correction_bias`, float32 `[experts]`; used for selection only."""
    down_proj: Tensor
    """`routed_expert_down_proj` `[latent, hidden]`."""
    latent_norm: Tensor | None
    """`routed_expert_norm` `[latent]`; None where the config switches it off."""
    up_proj: Tensor
    """`routed_expert_up_proj` `[hidden, latent]`."""
    shared: GluWeights | None
    """None when the model has no shared experts."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. AttnRes vectors are folded: `res_norm * res_proj`, float32 `[hidden]`."""

    attention_mix: Tensor
    mlp_mix: Tensor
    input_norm: Tensor
    post_attention_norm: Tensor
    attention: KdaWeights | MlaWeights
    mlp: GluWeights | LatentMoeWeights


@dataclass(frozen=True, slots=True)
class AttentionSideWeights:
    """Everything an attention worker loads."""

    embedding: Tensor
    """`[vocab, hidden]`."""
    layers: tuple[LayerWeights, ...]
    output_mix: Tensor
    """Folded output AttnRes vector, float32 `[hidden]`."""
    final_norm: Tensor
    lm_head: Tensor
    """`[vocab, hidden]`."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """An MXFP4 matrix as stored: E2M1 nibbles, low nibble first, one E8M0 scale per 32 inputs."""

    packed: Tensor
    """uint8 `[out, in / 2]`."""
    scale: Tensor
    """uint8 `[out, in / 32]`, value `2^(code - 127)`."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One routed expert in latent space; packed until use when the checkpoint stores it packed."""

    gate: Tensor | PackedMatrix
    """`w1` `[expert hidden, latent]`."""
    up: Tensor | PackedMatrix
    """`w3` `[expert hidden, latent]`."""
    down: Tensor | PackedMatrix
    """`w2` `[latent, expert hidden]`."""

    @property
    def num_bytes(self) -> int:
        """Bytes held in memory."""
        total = 0
        for matrix in (self.gate, self.up, self.down):
            parts = (matrix.packed, matrix.scale) if isinstance(matrix, PackedMatrix) else (matrix,)
            total += sum(part.numel() * part.element_size() for part in parts)
        return total
