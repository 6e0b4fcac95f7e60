from __future__ import annotations

import numpy as np
import pytest

from configs.errors import RoutingError, WorkerError
from configs.ids import Epoch, WorkerId
from router.dispatch_plan import DispatchPlan
from router.pairs import EXPERT, ROW, list_pairs
from router.placement import LayerPlacement
from router.plan import plan_dispatch
from router.routes import LayerRoutes, index_placement

A, B, C = WorkerId("expert-a"), WorkerId("expert-b"), WorkerId("expert-c")


def routes(*holders: tuple[WorkerId, ...], connected: set[WorkerId] | None = None) -> LayerRoutes:
    placement = LayerPlacement(layer=7, epoch=Epoch(3), holders=holders)
    return index_placement(placement, connected=connected)


def plan(made: LayerRoutes, *rows: list[int]) -> DispatchPlan:
    """Plan a batch whose tokens pick the experts of `rows`."""
    ids = np.array(rows, np.int64)
    weights = np.zeros(ids.shape, np.float32)
    return plan_dispatch(list_pairs(ids, weights, layer=7), len(rows), made)


def test_workers_are_indexed_by_name_whatever_the_placement_names_first() -> None:
    assert routes((B,), (A,), (B,)).workers == (A, B)


def test_a_single_worker_gets_everything_as_it_is() -> None:
    [part] = plan(routes((A,), (A,), (A,)), [2, 0], [1, 2]).parts
    assert part.pairs_3Q[EXPERT].tolist() == [2, 0, 1, 2]
    assert part.pairs_3Q[ROW].tolist() == [0, 0, 1, 1]
    assert (part.num_rows, part.rows_N, part.positions_Q) == (2, None, None)


def test_a_token_goes_once_to_a_worker_that_holds_several_of_its_experts() -> None:
    first, second = plan(routes((A,), (A,), (A,), (B,)), [0, 1, 2], [2, 3, 1]).parts
    assert (first.num_rows, first.num_pairs) == (2, 5)
    assert (second.num_rows, second.num_pairs) == (1, 1)
    assert second.rows_N is not None
    assert second.rows_N.tolist() == [1]
    assert second.pairs_3Q[ROW].tolist() == [0]
    assert second.positions_Q is not None
    assert second.positions_Q.tolist() == [4]


def test_workers_without_pairs_get_no_part() -> None:
    parts = plan(routes((A,), (B,), (C,)), [0], [0]).parts
    assert [part.worker for part in parts] == [0]


def test_copies_share_the_pairs_of_an_expert() -> None:
    parts = plan(routes((A, B)), *[[0]] * 6).parts
    assert [part.num_pairs for part in parts] == [3, 3]


def test_a_copy_on_a_worker_that_is_not_connected_is_not_used() -> None:
    [part] = plan(routes((A, B), connected={B}), *[[0]] * 6).parts
    assert part.num_pairs == 6


def test_a_batch_of_no_tokens_needs_nobody() -> None:
    ids = np.empty((0, 4), np.int64)
    pairs = list_pairs(ids, ids.astype(np.float32), layer=7)
    assert plan_dispatch(pairs, 0, routes((A,))).parts == ()


@pytest.mark.parametrize("expert", [2, 1000, -1], ids=str)
def test_an_unknown_expert_is_named(expert: int) -> None:
    with pytest.raises(RoutingError, match=rf"token 1 picks expert {expert}, experts are 0..1"):
        plan(routes((A,), (B,)), [0], [expert])


def test_an_expert_without_a_connected_holder_is_named() -> None:
    with pytest.raises(WorkerError, match=r"no connected expert worker holds expert 1 \(epoch 3\)"):
        plan(routes((A,), (B,), connected={A}), [0], [1])


def test_others_are_still_dispatched_when_an_expert_has_no_holder() -> None:
    parts = plan(routes((A,), (B,), connected={A}), [0], [0]).parts
    assert [part.num_pairs for part in parts] == [2]
