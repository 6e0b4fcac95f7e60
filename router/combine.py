"""Adding up the answers of the expert workers, in float32 and in one fixed order.

Canonical: the weighted pair answers of a token are added in ascending logical expert id, one after
the other, so that the bits do not depend on workers, placement or arrival. Product and sum are
separate operations: a fused one would round differently in vectors and in tails. Presum: the
partial sums are added in ascending worker order.

Shapes: T tokens, K picks per token, P = K T pairs, L latent, N tokens of one worker's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.numerics import FloatType
from router.dispatch_plan import WorkerPart
from router.pairs import PairOrder
from router.staging import TORCH_TYPES, StagingRows
from router.transport.base import Bytes

__all__ = ["TORCH_TYPES", "LatentSum", "PartialSum"]

_BLOCK_VALUES = 1 << 17
"""Values worked on at once: few operations for small batches, in cache for large ones."""
_KEPT_SIZES = 64


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The answer of one worker in presum mode."""

    part: WorkerPart
    answers: Bytes
    """Sums `[N, L]`, wire dtype, as flat bytes; may be a view of a frame."""


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Views of the working memory for one number of pairs; see `router/staging.py` for why."""

    answers: Tensor
    """`[P, L]`, wire dtype."""
    answer_rows: Bytes
    """The same memory as rows of bytes."""
    terms: Tensor
    """`[P, L]`, float32."""
    terms_array: NDArray[np.float32]
    """The same memory."""
    weights: Tensor
    """`[P, 1]`, float32."""
    weights_array: NDArray[np.float32]
    """The same memory, `[P]`."""


class LatentSum:
    """Weighted sums and sums of answers. Keeps its working memory; owned by one thread."""

    def __init__(self, *, latent_size: int, wire_dtype: FloatType) -> None:
        """Prepare for answers of `latent_size` values of `wire_dtype`."""
        self._latent_size = latent_size
        self._staging = StagingRows(row_size=latent_size, wire_dtype=wire_dtype)
        self._partial = StagingRows(row_size=latent_size, wire_dtype=wire_dtype)
        self._max_rows = max(1, _BLOCK_VALUES // latent_size)
        self._staging.views(self._max_rows)
        self._terms = torch.empty(self._max_rows, latent_size)
        self._weights = torch.empty(self._max_rows, 1)
        self._workspaces: dict[int, _Workspace] = {}

    def add_pairs(self, answers: Bytes, *, order: PairOrder, num_tokens: int) -> Tensor:
        """Return the weighted sums `[T, L]`, float32.

        Args:
            answers: Pair answers, wire dtype, as flat bytes.
            order: Canonical order of the pairs.
            num_tokens: T; P is a multiple of it.
        """
        sums = np.empty((num_tokens, self._latent_size), np.float32)
        num_pairs = order.weights_P.size
        if num_pairs == 0:
            sums.fill(0.0)
            return torch.from_numpy(sums)
        rows = answers.reshape(num_pairs, -1)
        if num_pairs <= self._max_rows:
            terms = self._weigh(rows, order.positions_P, order.weights_P)
            _add_in_order(terms.reshape(num_pairs // num_tokens, -1), sums.reshape(-1))
        else:
            self._add_in_blocks(rows, order, sums)
        return torch.from_numpy(sums)

    def add_partial_sums(self, partial_sums: Sequence[PartialSum], *, num_tokens: int) -> Tensor:
        """Return the sums `[T, L]`, float32, adding in the order given."""
        sums_TL = torch.empty(num_tokens, self._latent_size)
        if not partial_sums or partial_sums[0].part.rows_N is not None:
            sums_TL.zero_()
        total = sums_TL.numpy()
        for i, partial in enumerate(partial_sums):
            values_NL, rows = self._partial.views(partial.part.num_rows)
            np.copyto(rows, partial.answers.reshape(rows.shape))
            if partial.part.rows_N is not None:
                total[partial.part.rows_N] += values_NL.float().numpy()
            elif i == 0:
                sums_TL.copy_(values_NL)
            else:
                total += values_NL.float().numpy()
        return sums_TL

    def _weigh(
        self, rows: Bytes, positions: NDArray[np.int64], weights: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return weighted answers `[len(positions), L]`, valid until the next call."""
        space = self._workspaces.get(positions.size)
        if space is None:
            space = self._make_workspace(positions.size)
        rows.take(positions, 0, space.answer_rows, "clip")
        space.weights_array[:] = weights
        space.terms.copy_(space.answers)
        space.terms.mul_(space.weights)
        return space.terms_array

    def _add_in_blocks(self, rows: Bytes, order: PairOrder, sums: NDArray[np.float32]) -> None:
        """Sum in blocks of tokens and picks; the order of a token's terms stays the same."""
        num_tokens = sums.shape[0]
        step = max(1, self._max_rows // 4)
        for start in range(0, num_tokens, step):
            block = sums[start : start + step]
            for first in range(start, order.weights_P.size, num_tokens):
                picked = slice(first, first + block.shape[0])
                terms = self._weigh(rows, order.positions_P[picked], order.weights_P[picked])
                if first == start:
                    np.copyto(block, terms)
                else:
                    np.add(block, terms, block)

    def _make_workspace(self, num_pairs: int) -> _Workspace:
        if len(self._workspaces) >= _KEPT_SIZES:
            self._workspaces.clear()
        answers, answer_rows = self._staging.views(num_pairs)
        terms, weights = self._terms[:num_pairs], self._weights[:num_pairs]
        space = _Workspace(
            answers=answers,
            answer_rows=answer_rows,
            terms=terms,
            terms_array=terms.numpy(),
            weights=weights,
            weights_array=weights.numpy().reshape(-1),
        )
        self._workspaces[num_pairs] = space
        return space


def _add_in_order(terms: NDArray[np.float32], total: NDArray[np.float32]) -> None:
    """Set `total` to the sum of the rows of `terms`, first to last."""
    if len(terms) == 1:
        np.copyto(total, terms[0])
        return
    np.add(terms[0], terms[1], total)
    for term in terms[2:]:
        np.add(total, term, total)
