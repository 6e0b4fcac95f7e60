"""A small random model with every feature on, and the plain way to run requests through it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from configs.numerics import Numerics
from model.batch import Segment, StepBatch
from model.cache import ModelMemory, allocate_memory
from model.decoder import Decoder, drive
from model.dims import KdaDims, LayerKind, MlaDims, ModelDims, MoeDims
from model.dispatcher import Ticket
from model.linear import linear
from model.reference import ReferenceTicket
from model.situ import situ_glu
from model.weight_tree import (
    AttentionSideWeights,
    GluWeights,
    KdaWeights,
    LatentMoeWeights,
    LayerWeights,
    MlaWeights,
)

CPU = torch.device("cpu")
BLOCK_SIZE = 8
MAX_TOKENS = 256
NUM_SLOTS = 6


def small_dims() -> ModelDims:
    """Four layers: KDA and dense, KDA, MLA, MLA; AttnRes blocks of two; odd head counts."""
    return ModelDims(
        vocab_size=67,
        hidden_size=32,
        dense_hidden_size=48,
        num_dense_layers=1,
        context_tokens=MAX_TOKENS,
        rms_norm_eps=1e-5,
        attn_res_block_size=2,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        layer_kinds=(LayerKind.KDA, LayerKind.KDA, LayerKind.MLA, LayerKind.MLA),
        kda=KdaDims(num_heads=3, head_dim=16, conv_kernel_size=4, gate_lower_bound=-5.0),
        mla=MlaDims(
            num_heads=2,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            norm_eps=1e-6,
        ),
        moe=MoeDims(
            num_experts=9,
            num_experts_per_token=3,
            num_shared_experts=1,
            expert_hidden_size=16,
            latent_size=16,
            has_latent_norm=True,
            renormalize=True,
            routed_scaling_factor=2.0,
        ),
        eos_token_ids=(1,),
    )


class RandomTensors:
    """Draws weights at the scale of a trained model."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def matrix(self, *shape: int) -> Tensor:
        return self.float32(*shape, scale=shape[-1] ** -0.5).to(self._dtype)

    def norm(self, size: int) -> Tensor:
        return (1 + self.float32(size, scale=0.2)).to(self._dtype)

    def float32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def kda(self, dims: ModelDims) -> KdaWeights:
        kda, hidden = dims.kda, dims.hidden_size
        return KdaWeights(
            qkv_proj=self.matrix(3 * kda.inner_size, hidden),
            conv=self.float32(3 * kda.inner_size, kda.conv_kernel_size, scale=0.5),
            decay_down_proj=self.matrix(kda.head_dim, hidden),
            decay_up_proj=self.matrix(kda.inner_size, kda.head_dim),
            decay_bias=self.float32(kda.inner_size),
            decay_rate=self.float32(kda.num_heads).exp(),
            beta_proj=self.matrix(kda.num_heads, hidden),
            gate_proj=self.matrix(kda.inner_size, hidden),
            out_norm=1 + self.float32(kda.head_dim, scale=0.2),
            out_proj=self.matrix(hidden, kda.inner_size),
        )

    def mla(self, dims: ModelDims) -> MlaWeights:
        mla, hidden = dims.mla, dims.hidden_size
        rank, heads = mla.q_lora_rank, mla.num_heads
        query_rows = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        return MlaWeights(
            q_down_proj=None if rank is None else self.matrix(rank, hidden),
            q_down_norm=None if rank is None else self.norm(rank),
            q_up_proj=self.matrix(query_rows, hidden if rank is None else rank),
            kv_down_proj=self.matrix(mla.cache_width, hidden),
            kv_down_norm=self.norm(mla.kv_lora_rank),
            k_up_proj=self.matrix(heads, mla.qk_nope_head_dim, mla.kv_lora_rank),
            v_up_proj=self.matrix(heads, mla.v_head_dim, mla.kv_lora_rank),
            gate_proj=self.matrix(heads * mla.v_head_dim, hidden),
            out_proj=self.matrix(hidden, heads * mla.v_head_dim),
        )

    def glu(self, hidden: int, inner: int) -> GluWeights:
        return GluWeights(
            gate_proj=self.matrix(inner, hidden),
            up_proj=self.matrix(inner, hidden),
            down_proj=self.matrix(hidden, inner),
        )

    def moe(self, dims: ModelDims) -> LatentMoeWeights:
        moe, hidden = dims.moe, dims.hidden_size
        has_shared = moe.num_shared_experts > 0
        return LatentMoeWeights(
            router=self.float32(moe.num_experts, hidden, scale=hidden**-0.5),
            selection_bias=self.float32(moe.num_experts, scale=0.1),
            down_proj=self.matrix(moe.latent_size, hidden),
            latent_norm=self.norm(moe.latent_size) if moe.has_latent_norm else None,
            up_proj=self.matrix(hidden, moe.latent_size),
            shared=self.glu(hidden, moe.shared_hidden_size) if has_shared else None,
        )


def random_weights(
    dims: ModelDims, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> AttentionSideWeights:
    """Weights of the attention side."""
    draw = RandomTensors(seed, dtype)
    hidden = dims.hidden_size
    layers = tuple(
        LayerWeights(
            attention_mix=draw.float32(hidden, scale=hidden**-0.5),
            mlp_mix=draw.float32(hidden, scale=hidden**-0.5),
            input_norm=draw.norm(hidden),
            post_attention_norm=draw.norm(hidden),
            attention=draw.kda(dims) if kind is LayerKind.KDA else draw.mla(dims),
            mlp=draw.glu(hidden, dims.dense_hidden_size)
            if index < dims.num_dense_layers
            else draw.moe(dims),
        )
        for index, kind in enumerate(dims.layer_kinds)
    )
    return AttentionSideWeights(
        embedding=draw.float32(dims.vocab_size, hidden).to(dtype),
        layers=layers,
        output_mix=draw.float32(hidden, scale=hidden**-0.5),
        final_norm=draw.norm(hidden),
        lm_head=draw.matrix(dims.vocab_size, hidden),
    )


class RandomExperts:
    """Routed experts with random weights; an `ExpertFunction`."""

    def __init__(self, dims: ModelDims, *, seed: int = 1, dtype: torch.dtype = torch.float32):
        draw = RandomTensors(seed, dtype)
        moe = dims.moe
        self._dims = dims
        self._weights = {
            (layer, expert): draw.glu(moe.latent_size, moe.expert_hidden_size)
            for layer in dims.moe_layers
            for expert in range(moe.num_experts)
        }

    def __call__(self, layer: int, expert_id: int, z_NL: Tensor) -> Tensor:
        weights = self._weights[layer, expert_id]
        gate = linear(z_NL, weights.gate_proj, numerics=Numerics.INVARIANT)
        up = linear(z_NL, weights.up_proj, numerics=Numerics.INVARIANT)
        dims = self._dims
        activated = situ_glu(gate, up, beta=dims.situ_beta, linear_beta=dims.situ_linear_beta)
        return linear(activated, weights.down_proj, numerics=Numerics.INVARIANT)


class GroupedDispatcher:
    """Computes each expert once for all its rows, and adds as `ReferenceDispatcher` does.

    A row of `RandomExperts` has the same bits in any group, so the two agree bit for bit; this one
    makes property tests fast enough.
    """

    def __init__(self, experts: RandomExperts) -> None:
        self._experts = experts

    def begin(
        self, layer: int, z_TL: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> ReferenceTicket:
        u_TL = torch.zeros(z_TL.shape)
        for expert_id in expert_ids_TK.unique().tolist():
            rows, picks = (expert_ids_TK == expert_id).nonzero(as_tuple=True)
            y_NL = self._experts(layer, expert_id, z_TL[rows]).float()
            u_TL[rows] += weights_TK[rows, picks, None] * y_NL
        return ReferenceTicket(layer=layer, u_TL=u_TL)

    def finish(self, ticket: Ticket) -> Tensor:
        assert isinstance(ticket, ReferenceTicket)
        return ticket.u_TL


@dataclass(frozen=True)
class SmallModel:
    """A decoder, its experts and one memory."""

    dims: ModelDims
    decoder: Decoder
    experts: RandomExperts
    memory: ModelMemory

    @classmethod
    def build(
        cls,
        *,
        dims: ModelDims | None = None,
        numerics: Numerics = Numerics.FAST,
        dtype: torch.dtype = torch.float32,
    ) -> SmallModel:
        dims = small_dims() if dims is None else dims
        return cls(
            dims=dims,
            decoder=Decoder(dims, random_weights(dims, dtype=dtype), numerics=numerics),
            experts=RandomExperts(dims, dtype=dtype),
            memory=fresh_memory(dims, dtype=dtype),
        )

    def with_fresh_memory(self) -> SmallModel:
        dtype = self.memory.kv_MNPC.dtype
        return replace(self, memory=fresh_memory(self.dims, dtype=dtype))

    def run(self, *parts: Part) -> list[Tensor]:
        """One lane over these parts. Returns the logits of every token, per part."""
        segments, token_ids = [], []
        for part in parts:
            segments.append(part.segment(start=len(token_ids)))
            token_ids += part.token_ids
        batch = StepBatch(torch.tensor(token_ids), tuple(segments), torch.arange(len(token_ids)))
        with torch.inference_mode():
            logits = drive(self.decoder.run(batch, self.memory, GroupedDispatcher(self.experts)))
        return list(logits.split([len(part.token_ids) for part in parts]))


@dataclass(frozen=True)
class Part:
    """Tokens of one request in one step. Request i owns slot i and every `NUM_SLOTS`-th block."""

    request: int
    token_ids: list[int]
    position: int = 0
    is_decode: bool = False

    def segment(self, *, start: int) -> Segment:
        return Segment(
            start=start,
            num_tokens=len(self.token_ids),
            position=self.position,
            is_decode=self.is_decode,
            state_slot=self.request,
            block_table=block_table(self.request),
        )


def block_table(request: int) -> tuple[int, ...]:
    """Blocks of a request, in falling order so that nothing relies on a rising one."""
    blocks = range(request, NUM_SLOTS * MAX_TOKENS // BLOCK_SIZE, NUM_SLOTS)
    return tuple(reversed(blocks))


def fresh_memory(dims: ModelDims, *, dtype: torch.dtype = torch.float32) -> ModelMemory:
    """Zeroed memory for `NUM_SLOTS` requests of `MAX_TOKENS`."""
    return allocate_memory(
        dims,
        num_blocks=NUM_SLOTS * MAX_TOKENS // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_slots=NUM_SLOTS,
        dtype=dtype,
        device=CPU,
    )


def random_tokens(num: int, *, seed: int) -> list[int]:
    """Token ids of the small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 67, (num,), generator=generator).tolist()
