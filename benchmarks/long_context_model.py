"""A small K3-shaped model for `context_length.py` whose attention layers are timed from outside."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from configs.numerics import FloatType, Numerics
from model.batch import Segment, StepBatch
from model.cache import ModelMemory, allocate_memory
from model.checkpoint import Checkpoint
from model.checkpoint_spec import CheckpointSpec, demo_dims, demo_layer_kinds
from model.checkpoint_writer import write_checkpoint
from model.decoder import Decoder, drive
from model.dims import LayerKind, ModelDims
from model.dispatcher import Ticket
from model.experts import Activation, expert_ffn
from model.reference import ReferenceDispatcher, ReferenceTicket
from model.step_plan import StepPlan
from model.storage import StorageFormat
from model.weight_tree import AttentionSideWeights

CPU = torch.device("cpu")
BLOCK_TOKENS = 64
PROMPT_SLOT, SCRATCH_SLOT = 0, 1


def long_context_dims(context_tokens: int) -> ModelDims:
    """Four layers, KDA to MLA 3 : 1 as in K3, few heads; 576 bytes of float32 cache per token."""
    small = demo_dims()
    return replace(
        small,
        hidden_size=64,
        dense_hidden_size=128,
        context_tokens=context_tokens,
        layer_kinds=demo_layer_kinds(4),
        kda=replace(small.kda, num_heads=2, head_dim=32),
        mla=replace(
            small.mla,
            num_heads=2,
            q_lora_rank=32,
            kv_lora_rank=128,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=16,
        ),
        moe=replace(
            small.moe,
            num_experts=8,
            num_experts_per_token=2,
            num_shared_experts=1,
            expert_hidden_size=32,
            latent_size=32,
        ),
    )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the seconds of one step went."""

    total_s: float
    kda_s: float
    """All KDA layers: projections, convolution, recurrence, output."""
    mla_s: float
    """All MLA layers: projections, cache, attention, output."""


class TimedDecoder(Decoder):
    """A decoder that adds up the time in its attention layers, by kind."""

    def __init__(self, dims: ModelDims, weights: AttentionSideWeights) -> None:
        """Compute with fast numerics."""
        super().__init__(dims, weights, numerics=Numerics.FAST)
        self._kinds = dims.layer_kinds
        self.seconds = dict.fromkeys(LayerKind, 0.0)

    def _attend(self, index: int, x_TD: Tensor, plan: StepPlan, memory: ModelMemory) -> Tensor:
        started = time.perf_counter()
        attended_TD = super()._attend(index, x_TD, plan, memory)
        self.seconds[self._kinds[index]] += time.perf_counter() - started
        return attended_TD


class LocalExperts(ReferenceDispatcher):
    """The routed experts in place, each once for all its rows."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Load them all."""
        dims = checkpoint.dims
        activation = Activation.of(dims)
        weights = {
            (layer, expert): checkpoint.load_expert(layer, expert, dtype=torch.float32, device=CPU)
            for layer in dims.moe_layers
            for expert in range(dims.moe.num_experts)
        }

        def compute(layer: int, expert_id: int, z_NL: Tensor) -> Tensor:
            expert = weights[layer, expert_id]
            return expert_ffn(expert, z_NL, activation=activation, numerics=Numerics.FAST)

        super().__init__(compute)
        self._compute = compute

    def begin(
        self, layer: int, z_TL: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> ReferenceTicket:
        """Compute all of them at once."""
        u_TL = torch.zeros(z_TL.shape)
        for expert_id in expert_ids_TK.unique().tolist():
            rows, picks = (expert_ids_TK == expert_id).nonzero(as_tuple=True)
            u_TL[rows] += weights_TK[rows, picks, None] * self._compute(
                layer, expert_id, z_TL[rows]
            )
        return ReferenceTicket(layer=layer, u_TL=u_TL)

    def finish(self, ticket: Ticket) -> Tensor:
        """Hand over the sums."""
        return super().finish(ticket)


class LongContextModel:
    """One request that fills all of a memory: its prompt, and decode steps on a copied state."""

    def __init__(self, max_tokens: int) -> None:
        """Write and load the checkpoint, and allocate memory for `max_tokens`."""
        self.dims = long_context_dims(max_tokens)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "checkpoint"
            storage = StorageFormat(dtype=FloatType.FLOAT32, has_packed_experts=False)
            write_checkpoint(folder, CheckpointSpec(dims=self.dims, storage=storage), seed=0)
            checkpoint = Checkpoint.open(folder)
            self._decoder = TimedDecoder(
                self.dims, checkpoint.load_attention_side(dtype=torch.float32, device=CPU)
            )
            self._experts = LocalExperts(checkpoint)
        self._blocks = tuple(reversed(range(-(-max_tokens // BLOCK_TOKENS))))
        self._memory = self._allocate()
        self._tokens = itertools.cycle(range(2, 250))

    @property
    def cache_bytes_per_token(self) -> int:
        """MLA cache of all layers."""
        return len(self.dims.mla_layers) * self.dims.mla.cache_width * 4

    def prefill(self, position: int, num_tokens: int) -> StepTimes:
        """Compute the next chunk of the prompt."""
        return self._run(position, num_tokens, is_decode=False, slot=PROMPT_SLOT)

    def decode(self, position: int, num_steps: int) -> list[StepTimes]:
        """Generate from a copy of the prompt's state; the prompt may go on afterwards.

        The cache rows that this writes are those that the next chunk writes again.
        """
        self._memory.copy_slot(PROMPT_SLOT, SCRATCH_SLOT)
        return [
            self._run(position + i, 1, is_decode=True, slot=SCRATCH_SLOT) for i in range(num_steps)
        ]

    def forget(self) -> None:
        """Start over with an empty memory whose pages are not resident."""
        self._memory = self._allocate()

    def _allocate(self) -> ModelMemory:
        return allocate_memory(
            self.dims,
            num_blocks=len(self._blocks),
            block_size=BLOCK_TOKENS,
            num_slots=2,
            dtype=torch.float32,
            device=CPU,
        )

    @torch.inference_mode()
    def _run(self, position: int, num_tokens: int, *, is_decode: bool, slot: int) -> StepTimes:
        token_ids: Sequence[int] = list(itertools.islice(self._tokens, num_tokens))
        segment = Segment(0, num_tokens, position, is_decode, slot, self._blocks)
        batch = StepBatch(torch.tensor(token_ids), (segment,), torch.tensor([num_tokens - 1]))
        seconds = self._decoder.seconds
        seconds.update(dict.fromkeys(LayerKind, 0.0))
        started = time.perf_counter()
        drive(self._decoder.run(batch, self._memory, self._experts))
        total_s = time.perf_counter() - started
        return StepTimes(total_s, seconds[LayerKind.KDA], seconds[LayerKind.MLA])
