"""What all layers of one lane need to know about its batch, worked out once per lane.

Knows block tables and slots as numbers only. Row = index on the (padded) token axis; cache row =
index of a token in a layer's MLA pool, `block * block_size + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.errors import InvariantError
from configs.numerics import Numerics
from model.batch import Segment, StepBatch
from model.kda import CHUNK_TOKENS
from model.linear import ROW_TILE


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill segment."""

    start: int
    num_tokens: int
    position: int
    state_slot: int
    cache_rows_L: Tensor
    """int64: cache rows of positions 0 to `position + num_tokens`."""
    save_slot: int | None = None
    """Where its end state is copied to."""

    @property
    def stop(self) -> int:
        """Row after the last."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeWave:
    """At most one token of each decode segment, so that states advance in order."""

    rows_B: Tensor
    """int64 rows."""
    slots_B: Tensor
    """int64 state slots, distinct."""
    slot_range: slice | None
    """The slots as a range of the pool where they are one, so that they need no copies."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode tokens that attend together: independent queries over their own cached prefix."""

    rows_B: Tensor
    """int64 rows."""
    cache_blocks_N: Tensor
    """int64 block ids, the tables of all tokens one after the other, equally long; short ones are
    filled up with their own first block."""
    span: int
    """Cached positions computed per token: the longest prefix of the group."""
    mask_B1L: Tensor
    """float32 `[B, 1, span]`: 0 where a position is seen, -inf where not."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one lane."""

    num_tokens: int
    num_rows: int
    """Rows computed: tokens, padded under invariant numerics."""
    cache_rows_T: Tensor
    """int64: where each token's latent goes."""
    prefills: tuple[PrefillPlan, ...]
    decode_waves: tuple[DecodeWave, ...]
    decode_groups: tuple[DecodeGroup, ...]

    @property
    def is_single_wave(self) -> bool:
        """Whether the rows are one decode token per request, in order, and nothing else."""
        return (
            not self.prefills and len(self.decode_waves) == 1 and self.num_rows == self.num_tokens
        )


def plan_step(batch: StepBatch, *, block_size: int, numerics: Numerics) -> StepPlan:
    """Work out the plan of a lane. Reads the batch only.

    Raises:
        InvariantError: The segments do not tile the tokens, a block table is too short, or under
            invariant numerics a prefill segment starts off the tile grid.
    """
    num_tokens = int(batch.token_ids_T.shape[0])
    _check_segments(batch.segments, num_tokens, block_size=block_size, numerics=numerics)
    device = batch.token_ids_T.device
    prefills = [
        PrefillPlan(
            start=segment.start,
            num_tokens=segment.num_tokens,
            position=segment.position,
            state_slot=segment.state_slot,
            cache_rows_L=_locate_prefix(segment, block_size, device),
            save_slot=segment.save_slot,
        )
        for segment in batch.segments
        if not segment.is_decode
    ]
    decodes = [segment for segment in batch.segments if segment.is_decode]
    padding = -num_tokens % ROW_TILE if numerics is Numerics.INVARIANT else 0
    return StepPlan(
        num_tokens=num_tokens,
        num_rows=num_tokens + padding,
        cache_rows_T=_locate_tokens(batch.segments, block_size, device),
        prefills=tuple(prefills),
        decode_waves=_plan_waves(decodes, device),
        decode_groups=_plan_groups(decodes, block_size, device, numerics=numerics),
    )


def _check_segments(
    segments: Sequence[Segment], num_tokens: int, *, block_size: int, numerics: Numerics
) -> None:
    """Refuse a batch that the layers would compute wrongly."""
    next_row = 0
    for segment in segments:
        if segment.start != next_row or segment.num_tokens < 1:
            raise InvariantError(
                f"segment starts at row {segment.start} with {segment.num_tokens} tokens, "
                f"expected row {next_row} and at least 1 token"
            )
        next_row += segment.num_tokens
        end = segment.position + segment.num_tokens
        if end > len(segment.block_table) * block_size:
            raise InvariantError(
                f"block table of {len(segment.block_table)} blocks of {block_size} tokens does not "
                f"cover {end} tokens"
            )
        is_off_grid = not segment.is_decode and segment.position % CHUNK_TOKENS != 0
        if numerics is Numerics.INVARIANT and is_off_grid:
            raise InvariantError(
                f"under invariant numerics a prefill segment starts at a multiple of "
                f"{CHUNK_TOKENS} tokens, not at {segment.position}: align the chunks"
            )
    if next_row != num_tokens or num_tokens == 0:
        raise InvariantError(f"segments cover {next_row} rows of {num_tokens} tokens")


def _locate_tokens(segments: Sequence[Segment], block_size: int, device: torch.device) -> Tensor:
    """Cache row of every token of the lane."""
    rows = [
        segment.block_table[position // block_size] * block_size + position % block_size
        for segment in segments
        for position in range(segment.position, segment.position + segment.num_tokens)
    ]
    return torch.tensor(rows, device=device)


def _locate_prefix(segment: Segment, block_size: int, device: torch.device) -> Tensor:
    """Cache rows of the segment's positions 0 to its end."""
    end = segment.position + segment.num_tokens
    num_blocks = -(-end // block_size)
    blocks_N = torch.tensor(segment.block_table[:num_blocks], device=device)
    offsets_P = torch.arange(block_size, device=device)
    return (blocks_N[:, None] * block_size + offsets_P).flatten()[:end]


def _plan_waves(decodes: Sequence[Segment], device: torch.device) -> tuple[DecodeWave, ...]:
    """Wave i holds token i of every segment that has one."""
    waves = []
    for i in range(max((segment.num_tokens for segment in decodes), default=0)):
        members = [segment for segment in decodes if segment.num_tokens > i]
        slots = [segment.state_slot for segment in members]
        is_range = slots == list(range(slots[0], slots[0] + len(slots)))
        waves.append(
            DecodeWave(
                rows_B=torch.tensor([segment.start + i for segment in members], device=device),
                slots_B=torch.tensor(slots, device=device),
                slot_range=slice(slots[0], slots[0] + len(slots)) if is_range else None,
            )
        )
    return tuple(waves)


def _plan_groups(
    decodes: Sequence[Segment], block_size: int, device: torch.device, *, numerics: Numerics
) -> tuple[DecodeGroup, ...]:
    """Group decode tokens whose tables are about as long; alone under invariant numerics."""
    buckets: dict[int, list[tuple[int, int, Segment]]] = {}
    for segment in decodes:
        for i in range(segment.num_tokens):
            length = segment.position + i + 1
            row = segment.start + i
            # Within a factor of two the padding costs less than another round of small products.
            bucket = row if numerics is Numerics.INVARIANT else (length - 1).bit_length()
            buckets.setdefault(bucket, []).append((row, length, segment))
    return tuple(_plan_group(members, block_size, device) for members in buckets.values())


def _plan_group(
    members: Sequence[tuple[int, int, Segment]], block_size: int, device: torch.device
) -> DecodeGroup:
    """Pad the block tables of `(row, length, segment)` members to the longest."""
    lengths = [length for _, length, _ in members]
    span = max(lengths)
    num_blocks = -(-span // block_size)
    blocks: list[int] = []
    for _, length, segment in members:
        own = segment.block_table[: -(-length // block_size)]
        blocks.extend(own)
        blocks.extend(own[:1] * (num_blocks - len(own)))
    mask_BL = torch.zeros(len(members), span, device=device)
    if min(lengths) < span:
        lengths_B1 = torch.tensor(lengths, device=device)[:, None]
        mask_BL.masked_fill_(torch.arange(span, device=device) >= lengths_B1, -torch.inf)
    return DecodeGroup(
        rows_B=torch.tensor([row for row, _, _ in members], device=device),
        cache_blocks_N=torch.tensor(blocks, device=device),
        span=span,
        mask_B1L=mask_BL[:, None],
    )
