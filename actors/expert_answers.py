"""The answer to a dispatch: pair answers as they are, or their weighted sums, in wire dtype.

Shapes: N tokens of a frame, Q pairs of a frame, L latent size.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.expert_merge import Dispatch
from configs.numerics import Combine, FloatType
from router.frames import FrameHeader, FrameKind
from router.staging import StagingRows
from router.transport.base import Bytes

MAX_FAILURE_BYTES = 4096
_BLOCK_VALUES = 1 << 17
"""Values weighted at once: few operations for small batches, in cache for large ones."""


class AnswerMaker:
    """Makes answers in memory that it keeps. Owned by one thread."""

    def __init__(self, *, latent_size: int) -> None:
        """Prepare for latents of `latent_size` values."""
        self._wire = {
            wire_dtype: StagingRows(row_size=latent_size, wire_dtype=wire_dtype)
            for wire_dtype in FloatType
        }
        self._terms = StagingRows(row_size=latent_size, wire_dtype=FloatType.FLOAT32)
        self._sums = StagingRows(row_size=latent_size, wire_dtype=FloatType.FLOAT32)

    def make_answer(self, dispatch: Dispatch, y_QL: Tensor) -> tuple[FrameHeader, Bytes]:
        """Return the answer to a dispatch: header and payload, valid until the next call.

        Args:
            dispatch: What is answered.
            y_QL: Its pair answers, in the order of its pairs; any float type, left as they are.
        """
        header = dispatch.header
        rows = self._sum_pairs(dispatch, y_QL) if header.combine is Combine.PRESUM else y_QL
        payload = self._wire[header.wire_dtype].stage(rows).reshape(-1)
        return _answer_header(header, FrameKind.COMBINE, payload.nbytes), payload

    def _sum_pairs(self, dispatch: Dispatch, y_QL: Tensor) -> Tensor:
        """Return the weighted sums `[N, L]` in float32, each row's terms in the order of its pairs.

        Routers send the pairs of a token in ascending expert id.
        """
        num_tokens = dispatch.header.num_tokens
        sums_NL, sums_bytes = self._sums.views(num_tokens)
        sums: NDArray[np.float32] = sums_bytes.view(np.float32)
        sums.fill(0.0)
        weights_Q1 = torch.from_numpy(dispatch.weights.reshape(-1, 1))
        rows = dispatch.rows
        is_small = y_QL.numel() <= _BLOCK_VALUES
        if is_small:
            terms = self._weigh(y_QL, weights_Q1)
        for start, stop in _ascending_runs(rows):
            if is_small:
                run = terms[start:stop]
            else:
                run = self._weigh(y_QL[start:stop], weights_Q1[start:stop])
            # Rows of a run are distinct, so one addition takes all of them.
            if stop - start == num_tokens:
                np.add(sums, run, sums)
            else:
                sums[rows[start:stop]] += run
        return sums_NL

    def _weigh(self, y_QL: Tensor, weights_Q1: Tensor) -> NDArray[np.float32]:
        """Return the weighted answers in float32, valid until the next call."""
        terms_QL, terms_bytes = self._terms.views(y_QL.shape[0])
        terms_QL.copy_(y_QL)
        terms_QL.mul_(weights_Q1)
        terms: NDArray[np.float32] = terms_bytes.view(np.float32)
        return terms


def make_failure(header: FrameHeader, text: str) -> tuple[FrameHeader, Bytes]:
    """Return the frame that tells the sender of `header` what went wrong."""
    payload = np.frombuffer(text.encode()[:MAX_FAILURE_BYTES], np.uint8)
    return _answer_header(header, FrameKind.FAILURE, payload.nbytes), payload


def _ascending_runs(rows: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Return the [start, stop) of each longest run of strictly ascending rows."""
    stops = ((rows[1:] <= rows[:-1]).nonzero()[0] + 1).tolist()
    edges = [0, *stops, rows.size]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop]


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
