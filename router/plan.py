"""From the pairs of a dispatch to one frame per expert worker. Pure numpy; no links and no torch.

Shapes: T tokens, P pairs of a dispatch, N tokens of one frame, Q pairs of one frame, W workers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from configs.errors import WorkerError
from router.copies import NOBODY
from router.dispatch_plan import DispatchPlan, WorkerPart
from router.pairs import EXPERT, ROW, unknown_expert
from router.replica_choice import choose_workers
from router.routes import LayerRoutes


def plan_dispatch(
    pairs_3P: NDArray[np.uint32], num_tokens: int, routes: LayerRoutes
) -> DispatchPlan:
    """Split a batch by expert worker: every pair once, every latent once per worker that needs it.

    A single worker gets everything unchecked: it knows the experts it has, and `rank_pairs` checks
    while the frame is on its way.

    Args:
        pairs_3P: All pairs (`router/pairs.py`), in any order.
        num_tokens: T.
        routes: Routes of the layer.

    Raises:
        RoutingError: An id is unknown.
        WorkerError: No connected worker holds a picked expert.
    """
    num_pairs = pairs_3P.shape[1]
    if num_pairs == 0:
        return DispatchPlan(num_tokens, 0, ())
    if routes.is_complete and len(routes.workers) == 1:
        part = WorkerPart(0, num_tokens, None, pairs_3P, None)
        return DispatchPlan(num_tokens, num_pairs, (part,))
    owner_P = _choose_owners(pairs_3P, routes)
    parts = _split(pairs_3P, owner_P, num_tokens, len(routes.workers))
    return DispatchPlan(num_tokens, num_pairs, parts)


def _choose_owners(pairs: NDArray[np.uint32], routes: LayerRoutes) -> NDArray[np.int64]:
    """Return the worker index of each pair."""
    experts_P = pairs[EXPERT]
    if routes.owner_E is not None:
        try:
            owner_P: NDArray[np.int64] = routes.owner_E.take(experts_P)
        except IndexError as exc:
            raise unknown_expert(pairs, routes) from exc
    else:
        if experts_P[experts_P.argmax()] >= len(routes.copies.num_E):
            raise unknown_expert(pairs, routes)
        owner_P = np.empty(experts_P.size, np.int64)
        choose_workers(experts_P, routes.copies, np.zeros(len(routes.workers)), owner_P)
    if not routes.is_complete and np.minimum.reduce(owner_P) == NOBODY:
        expert = int(experts_P[owner_P == NOBODY][0])
        raise WorkerError(
            f"layer {routes.layer}: no connected expert worker holds expert {expert} "
            f"(epoch {routes.epoch}); load it somewhere or connect its holder"
        )
    return owner_P


def _split(
    pairs: NDArray[np.uint32], owner_P: NDArray[np.int64], num_tokens: int, num_workers: int
) -> tuple[WorkerPart, ...]:
    """Return the parts of all workers that own pairs."""
    order = owner_P.argsort(kind="stable")
    by_owner = pairs.take(order, axis=1)
    owners = owner_P.take(order)
    needs_WT = np.zeros((num_workers, num_tokens), np.bool_)
    needs_WT[owners, by_owner[ROW]] = True
    row_WT = needs_WT.cumsum(axis=1, dtype=np.uint32)
    row_WT -= 1
    by_owner[ROW] = row_WT[owners, by_owner[ROW]]
    _, tokens = needs_WT.nonzero()
    num_pairs_W = np.bincount(owner_P, minlength=num_workers).tolist()
    num_rows_W = np.count_nonzero(needs_WT, axis=1).tolist()
    parts = []
    pair, row = 0, 0
    for worker in range(num_workers):
        num_pairs, num_rows = num_pairs_W[worker], num_rows_W[worker]
        if num_pairs:
            parts.append(
                WorkerPart(
                    worker,
                    num_rows,
                    None if num_rows == num_tokens else tokens[row : row + num_rows],
                    np.ascontiguousarray(by_owner[:, pair : pair + num_pairs]),
                    order[pair : pair + num_pairs],
                )
            )
        pair += num_pairs
        row += num_rows
    return tuple(parts)
