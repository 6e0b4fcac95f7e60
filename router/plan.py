"""From routing choices to one frame per expert worker. Pure numpy; knows no links and no torch.

A pair is one (token, expert) pick. Pairs have one canonical order: by rank of the expert within its
token (ascending logical id), then by token, so pair `p = k T + t`. Sums over `k` in this order do
not depend on where experts live.

Shapes: T tokens, K picks per token, P = K T pairs, N tokens of one frame, Q pairs of one frame, E
logical experts, R most copies of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.errors import RoutingError, WorkerError
from configs.ids import Epoch, WorkerId
from router.placement import LayerPlacement
from router.replica_choice import choose_replica

ROW, WEIGHT, EXPERT = 0, 1, 2
"""Rows of a pair array, which is the wire's layout (`router/frames.py`)."""
NOBODY = -1


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """A layer's placement as arrays, for planning. Made once per placement."""

    layer: int
    epoch: Epoch
    workers: tuple[WorkerId, ...]
    """Workers by index, ascending by name."""
    num_copies_E: NDArray[np.int64]
    copies_ER: NDArray[np.int64]
    """Worker index of each copy; `NOBODY` beyond the copies, and where there is none."""
    owner_E: NDArray[np.int64] | None
    """Worker index of the only copy; None when some expert has several."""
    is_complete: bool
    """Whether every expert has a copy that can be reached."""


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
    """Canonical position of each pair, ascending; None for all."""

    @property
    def num_pairs(self) -> int:
        """Pairs in the frame."""
        return int(self.pairs_3Q.shape[1])


class DispatchPlan(msgspec.Struct, frozen=True):
    """A dispatch, split by expert worker."""

    num_tokens: int
    num_picks: int
    weights_P: NDArray[np.float32]
    """Routing weights in canonical pair order."""
    parts: tuple[WorkerPart, ...]
    """Ascending by worker; workers without pairs are left out."""


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
    return LayerRoutes(
        layer=placement.layer,
        epoch=placement.epoch,
        workers=workers,
        num_copies_E=np.array([len(copies) for copies in holders], np.int64),
        copies_ER=copies_ER,
        owner_E=np.ascontiguousarray(copies_ER[:, 0]) if most <= 1 else None,
        is_complete=all(holders),
    )


def plan_dispatch(
    expert_ids_TK: NDArray[np.int64], weights_TK: NDArray[np.float32], routes: LayerRoutes
) -> DispatchPlan:
    """Split a batch by expert worker: every pair once, every latent once per worker that needs it.

    Args:
        expert_ids_TK: Logical expert ids, distinct in a row.
        weights_TK: Routing weights.
        routes: Routes of the layer.

    Raises:
        RoutingError: The shapes differ, or an id is unknown or twice in a row.
        WorkerError: No connected worker holds a picked expert.
    """
    if expert_ids_TK.shape != weights_TK.shape or expert_ids_TK.ndim != 2:
        raise RoutingError(
            f"layer {routes.layer}: expert ids {expert_ids_TK.shape} and weights "
            f"{weights_TK.shape} must both be [tokens, picks]"
        )
    num_tokens, num_picks = expert_ids_TK.shape
    pairs = _canonical_pairs(expert_ids_TK, weights_TK)
    weights_P = pairs[WEIGHT].view(np.float32)
    if num_tokens == 0 or num_picks == 0:
        return DispatchPlan(num_tokens, num_picks, weights_P, ())
    experts_KT = pairs[EXPERT].reshape(num_picks, num_tokens)
    _check_distinct(experts_KT, routes)
    if routes.is_complete and len(routes.workers) == 1:
        # Ascending along the picks, so the last ones tell whether all are known.
        if np.maximum.reduce(experts_KT[-1]) >= len(routes.num_copies_E):
            raise _unknown_expert(pairs, routes)
        part = WorkerPart(0, num_tokens, None, pairs, None)
        return DispatchPlan(num_tokens, num_picks, weights_P, (part,))
    owner_P = _choose_owners(pairs, routes)
    return DispatchPlan(
        num_tokens, num_picks, weights_P, _split(pairs, owner_P, num_tokens, len(routes.workers))
    )


def _canonical_pairs(
    expert_ids_TK: NDArray[np.int64], weights_TK: NDArray[np.float32]
) -> NDArray[np.uint32]:
    """Return all pairs `[3, P]` in canonical order, the row being the token."""
    num_tokens, num_picks = expert_ids_TK.shape
    # One sort carries the weight along in the low half of the key.
    keys = np.empty((num_tokens, num_picks), "<u8")
    halves = keys.view("<u4").reshape(num_tokens, num_picks, 2)
    halves[:, :, 0] = weights_TK.view(np.uint32)
    halves[:, :, 1] = expert_ids_TK
    keys.sort(axis=1)
    pairs = np.empty((3, num_picks, num_tokens), np.uint32)
    pairs[ROW] = _token_positions(num_tokens)
    pairs[WEIGHT:] = halves.transpose(2, 1, 0)
    return pairs.reshape(3, num_picks * num_tokens)


@functools.lru_cache(maxsize=64)
def _token_positions(num_tokens: int) -> NDArray[np.uint32]:
    positions = np.arange(num_tokens, dtype=np.uint32)
    positions.flags.writeable = False
    return positions


def _check_distinct(experts_KT: NDArray[np.uint32], routes: LayerRoutes) -> None:
    same = experts_KT[1:] == experts_KT[:-1]
    if np.count_nonzero(same):
        rank, token = np.argwhere(same)[0]
        raise RoutingError(
            f"layer {routes.layer}: token {token} picks expert {experts_KT[rank, token]} twice; "
            "picks of a token must be distinct"
        )


def _choose_owners(pairs: NDArray[np.uint32], routes: LayerRoutes) -> NDArray[np.int64]:
    """Return the worker index of each pair."""
    experts_P = pairs[EXPERT]
    try:
        if routes.owner_E is not None:
            owner_P: NDArray[np.int64] = routes.owner_E.take(experts_P)
        else:
            copy_P = choose_replica(
                token_positions_P=pairs[ROW],
                experts_P=experts_P,
                num_copies_P=np.maximum(routes.num_copies_E.take(experts_P), 1),
            )
            owner_P = routes.copies_ER[experts_P, copy_P]
    except IndexError as exc:
        raise _unknown_expert(pairs, routes) from exc
    if not routes.is_complete and np.minimum.reduce(owner_P) == NOBODY:
        expert = int(experts_P[owner_P == NOBODY][0])
        raise WorkerError(
            f"layer {routes.layer}: no connected expert worker holds expert {expert} "
            f"(epoch {routes.epoch}); load it somewhere or connect its holder"
        )
    return owner_P


def _unknown_expert(pairs: NDArray[np.uint32], routes: LayerRoutes) -> RoutingError:
    num_experts = len(routes.num_copies_E)
    at = int(np.flatnonzero(pairs[EXPERT] >= num_experts)[0])
    # Ids travel as uint32: a negative one shows here as a large one.
    expert = int(pairs[EXPERT, at : at + 1].view(np.int32)[0])
    return RoutingError(
        f"layer {routes.layer}: token {pairs[ROW, at]} picks expert {expert}, "
        f"experts are 0..{num_experts - 1}"
    )


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
