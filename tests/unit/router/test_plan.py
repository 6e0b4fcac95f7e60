from __future__ import annotations

import numpy as np
import pytest

from configs.errors import RoutingError, WorkerError
from configs.ids import Epoch, WorkerId
from router.placement import LayerPlacement
from router.plan import EXPERT, ROW, WEIGHT, LayerRoutes, index_placement, plan_dispatch

A, B, C = WorkerId("expert-a"), WorkerId("expert-b"), WorkerId("expert-c")


def routes(*holders: tuple[WorkerId, ...], connected: set[WorkerId] | None = None) -> LayerRoutes:
    placement = LayerPlacement(layer=7, epoch=Epoch(3), holders=holders)
    return index_placement(placement, connected=connected)


def choices(*rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(rows, np.int64)
    return ids, (ids / 10).astype(np.float32)


def test_workers_are_indexed_by_name_whatever_the_placement_names_first() -> None:
    assert routes((B,), (A,), (B,)).workers == (A, B)


def test_pairs_stand_by_rank_of_their_expert_then_by_token() -> None:
    plan = plan_dispatch(*choices([2, 0], [1, 3]), routes((A,), (A,), (A,), (A,)))
    [part] = plan.parts
    assert part.pairs_3Q[EXPERT].tolist() == [0, 1, 2, 3]
    assert part.pairs_3Q[ROW].tolist() == [0, 1, 0, 1]
    expected = np.array([0.0, 0.1, 0.2, 0.3], np.float32)
    assert np.array_equal(part.pairs_3Q[WEIGHT].view(np.float32), expected)
    assert np.array_equal(plan.weights_P, expected)
    assert (part.rows_N, part.positions_Q) == (None, None)


def test_a_token_goes_once_to_a_worker_that_holds_several_of_its_experts() -> None:
    plan = plan_dispatch(*choices([0, 1, 2], [2, 3, 1]), routes((A,), (A,), (A,), (B,)))
    first, second = plan.parts
    assert (first.num_rows, first.num_pairs) == (2, 5)
    assert (second.num_rows, second.num_pairs) == (1, 1)
    assert second.rows_N is not None
    assert second.rows_N.tolist() == [1]
    assert second.pairs_3Q[ROW].tolist() == [0]


def test_workers_without_pairs_get_no_part() -> None:
    plan = plan_dispatch(*choices([0], [0]), routes((A,), (B,), (C,)))
    assert [part.worker for part in plan.parts] == [0]


def test_copies_share_the_pairs_of_an_expert() -> None:
    plan = plan_dispatch(*choices(*[[0]] * 6), routes((A, B)))
    assert [part.num_pairs for part in plan.parts] == [3, 3]


def test_a_copy_on_a_worker_that_is_not_connected_is_not_used() -> None:
    plan = plan_dispatch(*choices(*[[0]] * 6), routes((A, B), connected={B}))
    [part] = plan.parts
    assert part.num_pairs == 6


def test_a_batch_of_no_tokens_needs_nobody() -> None:
    ids = np.empty((0, 4), np.int64)
    plan = plan_dispatch(ids, ids.astype(np.float32), routes((A,)))
    assert (plan.num_tokens, plan.parts) == (0, ())


@pytest.mark.parametrize("holders", [((A,), (A,)), ((A,), (B,))], ids=["one-worker", "two"])
@pytest.mark.parametrize("expert", [2, 1000, -1], ids=str)
def test_an_unknown_expert_is_named(holders: tuple[tuple[WorkerId]], expert: int) -> None:
    with pytest.raises(RoutingError, match=rf"token 1 picks expert {expert}, experts are 0..1"):
        plan_dispatch(*choices([0], [expert]), routes(*holders))


def test_an_expert_picked_twice_by_a_token_is_named() -> None:
    with pytest.raises(RoutingError, match="layer 7: token 1 picks expert 2 twice"):
        plan_dispatch(*choices([0, 1, 2], [2, 0, 2]), routes((A,), (B,), (A,)))


def test_choices_of_different_shapes_are_refused() -> None:
    with pytest.raises(RoutingError, match=r"\(2, 1\) and weights \(1, 2\)"):
        plan_dispatch(np.zeros((2, 1), np.int64), np.zeros((1, 2), np.float32), routes((A,), (A,)))


def test_an_expert_without_a_connected_holder_is_named() -> None:
    with pytest.raises(WorkerError, match=r"no connected expert worker holds expert 1 \(epoch 3\)"):
        plan_dispatch(*choices([0], [1]), routes((A,), (B,), connected={A}))


def test_others_are_still_dispatched_when_an_expert_has_no_holder() -> None:
    plan = plan_dispatch(*choices([0], [0]), routes((A,), (B,), connected={A}))
    assert [part.num_pairs for part in plan.parts] == [2]


def test_weights_keep_their_bits() -> None:
    weights = np.array([[-0.0, np.inf, 1e-45]], np.float32)
    plan = plan_dispatch(np.array([[2, 1, 0]]), weights, routes((A,), (A,), (A,)))
    assert plan.weights_P.tobytes() == weights[:, ::-1].tobytes()
