"""The shape of a model: everything that `config.json` fixes, as frozen values.

Knows nothing about tensors, files or devices. `model/dims_reading.py` makes these from a config.
Layer indices are 0-based everywhere in this project (the released lists are 1-based).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """Which attention a layer has."""

    KDA = "kda"
    MLA = "mla"


@dataclass(frozen=True, slots=True)
class KdaDims:
    """Kimi Delta Attention."""

    num_heads: int
    head_dim: int
    """Key and value width of a head."""
    conv_kernel_size: int
    """Taps of the causal depthwise convolution; the state keeps one less."""
    gate_lower_bound: float
    """Lower bound of the log decay (negative)."""

    @property
    def inner_size(self) -> int:
        """Channels of q, of k and of v: heads x head width."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaDims:
    """Gated multi-head latent attention without positions."""

    num_heads: int
    q_lora_rank: int | None
    """Width of the query bottleneck; None when q is projected directly."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the key part shared by all heads. It is not rotated."""
    v_head_dim: int
    norm_eps: float
    """Epsilon of q_a_layernorm and kv_a_layernorm."""

    @property
    def cache_width(self) -> int:
        """Values cached per token: latent, then the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class MoeDims:
    """Stable LatentMoE."""

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    expert_hidden_size: int
    """Width inside one routed expert (`moe_intermediate_size`)."""
    latent_size: int
    """Width of the latent that crosses to the experts (`routed_expert_hidden_size`)."""
    has_latent_norm: bool
    renormalize: bool
    routed_scaling_factor: float

    @property
    def shared_hidden_size(self) -> int:
        """Width of the shared experts, which are stored as one MLP. 0 when there are none."""
        return self.num_shared_experts * self.expert_hidden_size


@dataclass(frozen=True, slots=True)
class ModelDims:
    """A whole text model."""

    vocab_size: int
    hidden_size: int
    dense_hidden_size: int
    """Width of the dense MLP of the first layers."""
    num_dense_layers: int
    """The first layers have a dense MLP, all later ones a LatentMoE."""
    context_tokens: int
    rms_norm_eps: float
    attn_res_block_size: int
    situ_beta: float
    situ_linear_beta: float | None
    """None leaves the up branch untouched."""
    layer_kinds: tuple[LayerKind, ...]
    kda: KdaDims
    mla: MlaDims
    moe: MoeDims
    eos_token_ids: tuple[int, ...]
    """Tokens that end a generation unless the request says otherwise."""

    @property
    def num_layers(self) -> int:
        """All layers."""
        return len(self.layer_kinds)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Indices of KDA layers, ascending. Position in this tuple = row of the KDA state."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind is LayerKind.KDA)

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """Indices of MLA layers, ascending. Position in this tuple = row of the MLA cache."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind is LayerKind.MLA)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of layers with routed experts, ascending."""
        return tuple(range(self.num_dense_layers, self.num_layers))
