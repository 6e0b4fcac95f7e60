"""Adding up the answers of the expert workers, in float32 and in one fixed order.

Canonical: the weighted pair answers of a token are added in ascending logical expert id, one after
the other, so that the bits do not depend on workers, placement or arrival. Product and sum are
separate operations: a fused one would round differently in vectors and in tails. Presum: the
partial sums are added in ascending worker order.

Shapes: T tokens, K picks per token, P = K T pairs in canonical order (`router/plan.py`), L latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from router.plan import WorkerPart

_BLOCK_VALUES = 1 << 17
"""Float32 values worked on at once: few operations for small batches, in cache for large ones."""


class PairSum:
    """Weighted sums of pair answers. Keeps its working memory; owned by one thread."""

    def __init__(self, latent_size: int) -> None:
        """Prepare for latents of `latent_size` values."""
        self._latent_size = latent_size
        self._scratch = torch.empty(max(_BLOCK_VALUES, latent_size))

    def combine(
        self, answers_PL: Tensor, weights_P: NDArray[np.float32], num_tokens: int
    ) -> Tensor:
        """Return the sums `[T, L]`, float32.

        Args:
            answers_PL: Pair answers in canonical order, wire dtype, on the CPU.
            weights_P: Routing weights in the same order.
            num_tokens: T; P is a multiple of it.
        """
        latent_size = self._latent_size
        sums_TL = np.empty((num_tokens, latent_size), np.float32)
        if num_tokens == 0 or not weights_P.size:
            sums_TL.fill(0.0)
            return torch.from_numpy(sums_TL)
        num_picks = weights_P.size // num_tokens
        weights_KT1 = torch.from_numpy(weights_P).view(num_picks, num_tokens, 1)
        answers_KTL = answers_PL.view(num_picks, num_tokens, latent_size)
        if answers_PL.numel() <= self._scratch.numel():
            self._add_block(answers_KTL, weights_KT1, sums_TL)
        else:
            self._add_blocks(answers_KTL, weights_KT1, sums_TL)
        return torch.from_numpy(sums_TL)

    def _add_block(
        self, answers_KTL: Tensor, weights_KT1: Tensor, sums_TL: NDArray[np.float32]
    ) -> None:
        """Sum a block whose pairs all fit the working memory."""
        scratch_KTL = self._scratch[: answers_KTL.numel()].view(answers_KTL.shape)
        scratch_KTL.copy_(answers_KTL)
        scratch_KTL.mul_(weights_KT1)
        terms = scratch_KTL.numpy()
        if len(terms) == 1:
            np.copyto(sums_TL, terms[0])
            return
        np.add(terms[0], terms[1], out=sums_TL)
        for term in terms[2:]:
            np.add(sums_TL, term, out=sums_TL)

    def _add_blocks(
        self, answers_KTL: Tensor, weights_KT1: Tensor, sums_TL: NDArray[np.float32]
    ) -> None:
        """Sum in blocks of tokens and of picks; the order of a token's terms stays the same."""
        num_picks, num_tokens, latent_size = answers_KTL.shape
        step = max(1, self._scratch.numel() // (latent_size * min(num_picks, 4)))
        for start in range(0, num_tokens, step):
            stop = min(start + step, num_tokens)
            sums = sums_TL[start:stop]
            term = self._scratch[: sums.size].view(stop - start, latent_size)
            for pick in range(num_picks):
                term.copy_(answers_KTL[pick, start:stop])
                term.mul_(weights_KT1[pick, start:stop])
                if pick == 0:
                    np.copyto(sums, term.numpy())
                else:
                    np.add(sums, term.numpy(), out=sums)


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The answer of one worker in presum mode."""

    part: WorkerPart
    sums_NL: Tensor
    """Wire dtype, CPU; may be a view of a frame."""


def add_partial_sums(
    partial_sums: Sequence[PartialSum], *, num_tokens: int, latent_size: int
) -> Tensor:
    """Return the sums `[T, L]`, float32, adding in the order given."""
    sums_TL = torch.empty(num_tokens, latent_size)
    if not partial_sums or partial_sums[0].part.rows_N is not None:
        sums_TL.zero_()
    total = sums_TL.numpy()
    for i, partial in enumerate(partial_sums):
        if partial.part.rows_N is not None:
            total[partial.part.rows_N] += partial.sums_NL.float().numpy()
        elif i == 0:
            sums_TL.copy_(partial.sums_NL)
        else:
            total += partial.sums_NL.float().numpy()
    return sums_TL
