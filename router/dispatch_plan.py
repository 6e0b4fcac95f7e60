"""A dispatch, split by expert worker: what `plan.py` makes and the rest of the router carries out.

Shapes: N tokens of one frame, Q pairs of one frame.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray


class WorkerPart(msgspec.Struct, frozen=True, gc=False):
    """What one expert worker gets of a dispatch. A msgspec struct, as one is made per frame."""

    worker: int
    """Index into `LayerRoutes.workers`."""
    num_rows: int
    rows_N: NDArray[np.int64] | None
    """Tokens whose latents are sent, ascending; None for all."""
    pairs_3Q: NDArray[np.uint32]
    """Row in the frame, bits of the float32 weight, logical expert. Contiguous."""
    positions_Q: NDArray[np.int64] | None
    """Position of each pair in the list of the dispatch, ascending; None for all."""

    @property
    def num_pairs(self) -> int:
        """Pairs in the frame."""
        return int(self.pairs_3Q.shape[1])


class DispatchPlan(msgspec.Struct, frozen=True):
    """A dispatch, split by expert worker."""

    num_tokens: int
    num_pairs: int
    parts: tuple[WorkerPart, ...]
    """Ascending by worker; workers without pairs are left out."""
