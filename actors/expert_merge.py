"""From dispatch frames to one batch of pairs, and back to one answer per frame. Pure.

Shapes: N tokens of a frame (or of merged frames), Q pairs of a frame, P pairs of merged frames, L
latent size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.errors import FrameError
from configs.numerics import Combine
from router.frames import PAIR_BYTES, FrameHeader, FrameKind
from router.plan import EXPERT, ROW, WEIGHT
from router.ticket import TORCH_TYPES
from router.transport.base import Bytes, Frame

MAX_FAILURE_BYTES = 4096
_WORD = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A parsed dispatch frame. Views of the frame's buffer."""

    header: FrameHeader
    z_NL: Tensor
    """Latents, wire dtype, CPU."""
    pairs_3Q: NDArray[np.uint32]
    """Row in `z_NL`, logical expert, bits of the float32 weight."""

    @property
    def rows(self) -> NDArray[np.uint32]:
        """Row of `z_NL` of each pair, `[Q]`."""
        rows: NDArray[np.uint32] = self.pairs_3Q[ROW]
        return rows

    @property
    def experts(self) -> NDArray[np.uint32]:
        """Logical expert of each pair, `[Q]`."""
        experts: NDArray[np.uint32] = self.pairs_3Q[EXPERT]
        return experts

    @property
    def weights(self) -> NDArray[np.float32]:
        """Routing weight of each pair, `[Q]`."""
        weights: NDArray[np.float32] = self.pairs_3Q[WEIGHT].view(np.float32)
        return weights


@dataclass(frozen=True, slots=True)
class PairBatch:
    """The pairs of one layer that are computed together."""

    layer: int
    z_NL: Tensor
    """Latents, CPU; wire dtype, float32 when frames differ in theirs."""
    rows_P: NDArray[np.uint32]
    """Row of `z_NL` of each pair."""
    experts_P: NDArray[np.uint32]
    """Logical expert of each pair."""


def parse_dispatch(frame: Frame) -> Dispatch:
    """Read a dispatch frame.

    Raises:
        FrameError: It is of another kind, or a pair names a row that the frame does not have.
    """
    header = frame.header
    if header.kind is not FrameKind.DISPATCH:
        raise FrameError(
            f"expert workers take dispatch frames, this one is {header.kind.name.lower()}"
        )
    latent_bytes = header.payload_bytes - header.num_pairs * PAIR_BYTES
    latents = torch.from_numpy(frame.payload[:latent_bytes])
    pairs = frame.payload[latent_bytes:].view(_WORD).reshape(3, header.num_pairs)
    if not pairs.flags.aligned:
        pairs = pairs.copy()
    if header.num_pairs and np.maximum.reduce(pairs[ROW]) >= header.num_tokens:
        raise FrameError(
            f"a pair names row {pairs[ROW].max()}, the frame has {header.num_tokens} rows"
        )
    return Dispatch(
        header=header,
        z_NL=latents.view(TORCH_TYPES[header.wire_dtype]).view(
            header.num_tokens, header.latent_size
        ),
        pairs_3Q=pairs,
    )


def merge_dispatches(dispatches: Sequence[Dispatch]) -> PairBatch:
    """Join frames of one layer into one batch, pairs in the order of the frames."""
    first = dispatches[0]
    if len(dispatches) == 1:
        return PairBatch(
            layer=first.header.layer,
            z_NL=first.z_NL,
            rows_P=first.rows,
            experts_P=first.experts,
        )
    latents = [dispatch.z_NL for dispatch in dispatches]
    if any(z_NL.dtype != latents[0].dtype for z_NL in latents):
        latents = [z_NL.to(torch.float32) for z_NL in latents]
    rows = []
    offset = 0
    for dispatch in dispatches:
        rows.append(dispatch.rows + np.uint32(offset))
        offset += dispatch.header.num_tokens
    return PairBatch(
        layer=first.header.layer,
        z_NL=torch.cat(latents),
        rows_P=np.concatenate(rows),
        experts_P=np.concatenate([dispatch.experts for dispatch in dispatches]),
    )


def make_answer(dispatch: Dispatch, y_QL: Tensor) -> tuple[FrameHeader, Bytes]:
    """Return the answer to a dispatch: header and payload.

    Args:
        dispatch: What is answered.
        y_QL: Its pair answers, in the order of its pairs; CPU, any float type.
    """
    header = dispatch.header
    if header.combine is Combine.PRESUM:
        y_QL = sum_pairs(dispatch, y_QL)
    payload = y_QL.to(TORCH_TYPES[header.wire_dtype]).contiguous().view(torch.uint8).numpy()
    return _answer_header(header, FrameKind.COMBINE, payload.nbytes), payload.reshape(-1)


def make_failure(header: FrameHeader, text: str) -> tuple[FrameHeader, Bytes]:
    """Return the frame that tells the sender of `header` what went wrong."""
    payload = np.frombuffer(text.encode()[:MAX_FAILURE_BYTES], np.uint8)
    return _answer_header(header, FrameKind.FAILURE, payload.nbytes), payload


def sum_pairs(dispatch: Dispatch, y_QL: Tensor) -> Tensor:
    """Return the weighted sums `[N, L]` in float32, each row's terms in ascending expert id."""
    header = dispatch.header
    answers = y_QL.to(torch.float32).numpy()
    sums_NL = np.zeros((header.num_tokens, header.latent_size), np.float32)
    rows = dispatch.rows.astype(np.int64)
    order = np.lexsort((dispatch.experts, rows))
    rank_Q = _rank_within_runs(rows[order])
    for rank in range(int(rank_Q.max()) + 1 if rank_Q.size else 0):
        # A row has at most one pair of a rank, so the indices of an addition are distinct.
        pairs = order[rank_Q == rank]
        sums_NL[rows[pairs]] += answers[pairs] * dispatch.weights[pairs, None]
    return torch.from_numpy(sums_NL)


def _rank_within_runs(sorted_Q: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each element's position within its run of equal values."""
    positions = np.arange(sorted_Q.size)
    is_start = np.ones(sorted_Q.size, np.bool_)
    is_start[1:] = sorted_Q[1:] != sorted_Q[:-1]
    starts = np.maximum.accumulate(np.where(is_start, positions, 0))
    ranks: NDArray[np.int64] = positions - starts
    return ranks


def _answer_header(header: FrameHeader, kind: FrameKind, num_bytes: int) -> FrameHeader:
    return FrameHeader(
        kind=kind,
        generation=header.generation,
        epoch=header.epoch,
        step=header.step,
        layer=header.layer,
        lane=header.lane,
        attempt=header.attempt,
        num_tokens=header.num_tokens,
        num_pairs=header.num_pairs,
        latent_size=header.latent_size,
        wire_dtype=header.wire_dtype,
        combine=header.combine,
        payload_bytes=num_bytes,
    )
