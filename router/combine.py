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
from router.plan import WorkerPart
from router.transport.base import Bytes

TORCH_TYPES = {FloatType.FLOAT32: torch.float32, FloatType.BFLOAT16: torch.bfloat16}
_BLOCK_VALUES = 1 << 17
"""Float32 values worked on at once: few operations for small batches, in cache for large ones."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The answer of one worker in presum mode."""

    part: WorkerPart
    answers: Bytes
    """Sums `[N, L]`, wire dtype, as flat bytes; may be a view of a frame."""


class LatentSum:
    """Weighted sums and sums of answers. Keeps its working memory; owned by one thread."""

    def __init__(self, *, latent_size: int, wire_dtype: FloatType) -> None:
        """Prepare for answers of `latent_size` values of `wire_dtype`."""
        self._latent_size = latent_size
        self._type = TORCH_TYPES[wire_dtype]
        self._scratch = torch.empty(max(_BLOCK_VALUES, latent_size))
        self._scratch_array: NDArray[np.float32] = self._scratch.numpy()

    def add_pairs(
        self,
        answers: Bytes,
        *,
        order_P: NDArray[np.int64],
        weights_P: NDArray[np.float32],
        num_tokens: int,
    ) -> Tensor:
        """Return the weighted sums `[T, L]`, float32.

        Args:
            answers: Pair answers, wire dtype, as flat bytes.
            order_P: Where in `answers` each pair of the canonical order stands (`rank_pairs`).
            weights_P: Routing weights in canonical order.
            num_tokens: T; P is a multiple of it.
        """
        sums = np.empty((num_tokens, self._latent_size), np.float32)
        num_values = weights_P.size * self._latent_size
        if num_values == 0:
            sums.fill(0.0)
            return torch.from_numpy(sums)
        rows = answers.reshape(weights_P.size, -1)
        if num_values <= self._scratch_array.size:
            self._add_at_once(rows, order_P, weights_P, sums)
        else:
            self._add_in_blocks(rows, order_P, weights_P, sums)
        return torch.from_numpy(sums)

    def add_partial_sums(self, partial_sums: Sequence[PartialSum], *, num_tokens: int) -> Tensor:
        """Return the sums `[T, L]`, float32, adding in the order given."""
        sums_TL = torch.empty(num_tokens, self._latent_size)
        if not partial_sums or partial_sums[0].part.rows_N is not None:
            sums_TL.zero_()
        total = sums_TL.numpy()
        for i, partial in enumerate(partial_sums):
            values = torch.from_numpy(partial.answers).view(self._type).view(-1, self._latent_size)
            if partial.part.rows_N is not None:
                total[partial.part.rows_N] += values.float().numpy()
            elif i == 0:
                sums_TL.copy_(values)
            else:
                total += values.float().numpy()
        return sums_TL

    def _add_at_once(
        self,
        rows: Bytes,
        order_P: NDArray[np.int64],
        weights_P: NDArray[np.float32],
        sums: NDArray[np.float32],
    ) -> None:
        """Sum pairs that all fit the working memory."""
        num_values = weights_P.size * self._latent_size
        scratch = self._scratch[:num_values]
        scratch.copy_(torch.from_numpy(rows.take(order_P, axis=0).reshape(-1)).view(self._type))
        scratch.view(-1, self._latent_size).mul_(torch.from_numpy(weights_P[:, None]))
        num_picks = weights_P.size // sums.shape[0]
        terms = self._scratch_array[:num_values].reshape(num_picks, -1)
        total = sums.reshape(-1)
        if num_picks == 1:
            np.copyto(total, terms[0])
            return
        np.add(terms[0], terms[1], total)
        for pick in range(2, num_picks):
            np.add(total, terms[pick], total)

    def _add_in_blocks(
        self,
        rows: Bytes,
        order_P: NDArray[np.int64],
        weights_P: NDArray[np.float32],
        sums: NDArray[np.float32],
    ) -> None:
        """Sum in blocks of tokens, pick by pick; the order of a token's terms stays the same."""
        num_tokens, latent_size = sums.shape
        weights_P1 = torch.from_numpy(weights_P[:, None])
        step = max(1, self._scratch_array.size // (4 * latent_size))
        for start in range(0, num_tokens, step):
            block = sums[start : start + step]
            term_NL = self._scratch[: block.size].view(-1, latent_size)
            term = self._scratch_array[: block.size].reshape(-1, latent_size)
            for first in range(start, weights_P.size, num_tokens):
                last = first + block.shape[0]
                answers = torch.from_numpy(rows.take(order_P[first:last], axis=0))
                term_NL.copy_(answers.view(self._type))
                term_NL.mul_(weights_P1[first:last])
                if first == start:
                    np.copyto(block, term)
                else:
                    np.add(block, term, block)
