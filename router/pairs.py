"""The pairs of a dispatch: one per (token, expert) pick. Pure numpy.

Pairs are listed token by token, in the order of the picks. Sums use their canonical order: by rank
of the expert within its token (ascending logical id), then by token, so that pair `k T + t` is the
`k`-th lowest expert of token `t`. It does not depend on where experts live, and it is not needed
before the answers are there.

Shapes: T tokens, K picks per token, P = T K pairs.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.errors import RoutingError
from router.routes import LayerRoutes

ROW, WEIGHT, EXPERT = 0, 1, 2
"""Rows of a pair array, which is the wire's layout (`router/frames.py`)."""


class PairOrder(msgspec.Struct, frozen=True):
    """The canonical order of the pairs of a dispatch."""

    positions_P: NDArray[np.int64]
    """Where in the list of pairs each stands."""
    weights_P: NDArray[np.float32]
    """Their routing weights."""


NO_ORDER = PairOrder(np.empty(0, np.int64), np.empty(0, np.float32))


def list_pairs(
    expert_ids_TK: NDArray[np.int64], weights_TK: NDArray[np.float32], *, layer: int
) -> NDArray[np.uint32]:
    """Return all pairs `[3, P]`: token, bits of the float32 weight, logical expert.

    Raises:
        RoutingError: The shapes differ.
    """
    if expert_ids_TK.shape != weights_TK.shape or expert_ids_TK.ndim != 2:
        raise RoutingError(
            f"layer {layer}: expert ids {expert_ids_TK.shape} and weights "
            f"{weights_TK.shape} must both be [tokens, picks]"
        )
    num_tokens, num_picks = expert_ids_TK.shape
    pairs = _rows_only(num_tokens, num_picks).copy()
    pairs[WEIGHT] = weights_TK.reshape(-1).view(np.uint32)
    pairs[EXPERT] = expert_ids_TK.reshape(-1)
    return pairs


def rank_pairs(pairs_3P: NDArray[np.uint32], num_tokens: int, routes: LayerRoutes) -> PairOrder:
    """Return the canonical order of listed pairs.

    Raises:
        RoutingError: An id is unknown, or twice in a row.
    """
    experts_P = pairs_3P[EXPERT]
    if experts_P.size == 0:
        return NO_ORDER
    num_picks = experts_P.size // num_tokens
    order_TK = experts_P.reshape(num_tokens, num_picks).argsort(axis=1)
    order_TK += _first_pair_of_token(num_tokens, num_picks)
    order_P: NDArray[np.int64] = order_TK.T.reshape(-1)
    experts_KT = experts_P.take(order_P).reshape(num_picks, num_tokens)
    # Ascending along the picks, so the last ones tell whether all are known.
    highest = experts_KT[-1]
    if highest[highest.argmax()] >= len(routes.copies.num_E):
        raise unknown_expert(pairs_3P, routes)
    same = experts_KT[1:] == experts_KT[:-1]
    if np.count_nonzero(same):
        rank, token = np.argwhere(same)[0]
        raise RoutingError(
            f"layer {routes.layer}: token {token} picks expert {experts_KT[rank, token]} twice; "
            "picks of a token must be distinct"
        )
    return PairOrder(order_P, pairs_3P[WEIGHT].view(np.float32).take(order_P))


def unknown_expert(pairs_3P: NDArray[np.uint32], routes: LayerRoutes) -> RoutingError:
    """Return the error about the first pair whose expert the layer does not have."""
    num_experts = len(routes.copies.num_E)
    at = int(np.flatnonzero(pairs_3P[EXPERT] >= num_experts)[0])
    # Ids travel as uint32: a negative one shows here as a large one.
    expert = int(pairs_3P[EXPERT, at : at + 1].view(np.int32)[0])
    return RoutingError(
        f"layer {routes.layer}: token {pairs_3P[ROW, at]} picks expert {expert}, "
        f"experts are 0..{num_experts - 1}"
    )


@functools.lru_cache(maxsize=64)
def _rows_only(num_tokens: int, num_picks: int) -> NDArray[np.uint32]:
    """Return a pair array that lacks weights and experts."""
    pairs = np.zeros((3, num_tokens * num_picks), np.uint32)
    pairs[ROW] = np.repeat(np.arange(num_tokens, dtype=np.uint32), num_picks)
    pairs.flags.writeable = False
    return pairs


@functools.lru_cache(maxsize=64)
def _first_pair_of_token(num_tokens: int, num_picks: int) -> NDArray[np.int64]:
    first = np.arange(num_tokens, dtype=np.int64)[:, None] * num_picks
    first.flags.writeable = False
    return first
