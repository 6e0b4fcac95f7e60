"""A layer's placement as arrays, for planning. Pure numpy.

Shapes: E logical experts, R most copies of an expert.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.ids import Epoch, WorkerId
from router.copies import NOBODY, Copies
from router.placement import LayerPlacement


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """A layer's placement as arrays, for planning. Made once per placement."""

    layer: int
    epoch: Epoch
    workers: tuple[WorkerId, ...]
    """Workers by index, ascending by name."""
    copies: Copies
    """Worker index of each copy that can be reached; workers count as equally fast."""
    owner_E: NDArray[np.int64] | None
    """Worker index of the only copy; None when some expert has several."""
    is_complete: bool
    """Whether every expert has a copy that can be reached."""


def index_placement(
    placement: LayerPlacement, *, connected: Collection[WorkerId] | None = None
) -> LayerRoutes:
    """Return the routes of a layer.

    Args:
        placement: Holders of every expert.
        connected: Workers that can be reached; None for all holders. Copies elsewhere are left out.
    """
    holders = [
        [worker for worker in copies if connected is None or worker in connected]
        for copies in placement.holders
    ]
    workers = tuple(sorted({worker for copies in holders for worker in copies}))
    index = {worker: i for i, worker in enumerate(workers)}
    most = max((len(copies) for copies in holders), default=1)
    copies_ER = np.full((len(holders), max(most, 1)), NOBODY, np.int64)
    for expert, copies in enumerate(holders):
        copies_ER[expert, : len(copies)] = [index[worker] for worker in copies]
    num_copies_E = np.array([len(copies) for copies in holders], np.int64)
    return LayerRoutes(
        layer=placement.layer,
        epoch=placement.epoch,
        workers=workers,
        copies=Copies(
            worker_ER=copies_ER,
            num_E=num_copies_E,
            replicated_M=np.flatnonzero(num_copies_E > 1),
            seconds_W=np.ones(len(workers)),
        ),
        owner_E=np.ascontiguousarray(copies_ER[:, 0]) if most <= 1 else None,
        is_complete=all(holders),
    )
