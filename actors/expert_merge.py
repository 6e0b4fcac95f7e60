"""From dispatch frames to one batch of pairs. Pure.

Latents stay bytes until they are computed with: a row is moved faster than it is converted.

Shapes: N tokens of a frame (or of merged frames), Q pairs of a frame, P pairs of merged frames, L
latent size.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.errors import FrameError
from configs.numerics import FloatType
from router.frames import PAIR_BYTES, FrameHeader, FrameKind
from router.pairs import EXPERT, ROW, WEIGHT
from router.staging import TORCH_TYPES
from router.transport.base import Bytes, Frame


class Dispatch(msgspec.Struct, frozen=True, gc=False):
    """A parsed dispatch frame. Views of the frame's buffer."""

    header: FrameHeader
    latents: Bytes
    """Wire dtype, one row of bytes per token."""
    pairs_3Q: NDArray[np.uint32]
    """Row in `latents`, bits of the float32 weight, logical expert."""

    @property
    def rows(self) -> NDArray[np.uint32]:
        """Row of each pair, `[Q]`."""
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


class PairBatch(msgspec.Struct, frozen=True, gc=False):
    """The pairs of one layer that are computed together."""

    layer: int
    wire_dtype: FloatType
    latents: Bytes
    """One row of bytes per token, `wire_dtype`."""
    rows_P: NDArray[np.uint32]
    """Row of `latents` of each pair."""
    experts_P: NDArray[np.uint32]
    """Logical expert of each pair."""

    def gather(self, pairs: NDArray[np.int64]) -> Tensor:
        """Return the latents of pairs, in the order given: `[len(pairs), L]`, wire dtype, CPU."""
        rows = self.latents.take(self.rows_P.take(pairs), axis=0)
        return torch.from_numpy(rows).view(TORCH_TYPES[self.wire_dtype])


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
    row_bytes = header.latent_size * header.wire_dtype.num_bytes
    pairs = frame.payload[latent_bytes:].view(np.uint32).reshape(3, header.num_pairs)
    rows = pairs[ROW]
    if header.num_pairs and (highest := rows[rows.argmax()]) >= header.num_tokens:
        raise FrameError(f"a pair names row {highest}, the frame has {header.num_tokens} rows")
    return Dispatch(
        header=header,
        latents=frame.payload[:latent_bytes].reshape(header.num_tokens, row_bytes),
        pairs_3Q=pairs,
    )


def merge_dispatches(dispatches: Sequence[Dispatch]) -> PairBatch:
    """Join frames of one layer and wire dtype into one batch, pairs in the order of the frames."""
    header = dispatches[0].header
    if len(dispatches) == 1:
        latents, rows, experts = dispatches[0].latents, dispatches[0].rows, dispatches[0].experts
    else:
        latents = np.concatenate([dispatch.latents for dispatch in dispatches])
        starts = np.cumsum([0] + [dispatch.header.num_tokens for dispatch in dispatches[:-1]])
        rows = np.concatenate(
            [d.rows + np.uint32(start) for d, start in zip(dispatches, starts, strict=True)]
        )
        experts = np.concatenate([dispatch.experts for dispatch in dispatches])
    return PairBatch(
        layer=header.layer,
        wire_dtype=header.wire_dtype,
        latents=latents,
        rows_P=rows,
        experts_P=experts,
    )
