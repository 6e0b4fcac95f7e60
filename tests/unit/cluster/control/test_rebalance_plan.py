"""Plans on loads whose right answer is plain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.control.rebalance import RebalanceRule, apply_changes, plan_rebalance
from cluster.control.worker_slots import WorkerCapacity, plan_slots
from configs.errors import PlacementError
from configs.ids import Epoch, WorkerId
from router.placement import LayerPlacement, Placement, plan_initial_placement

RULE = RebalanceRule(expert_bytes=1000, bytes_per_s=1e9, step_s=0.01)
NUM_EXPERTS = 8


def workers(num: int, slots: int = 3, **changes: object) -> list[WorkerCapacity]:
    return [
        replace(WorkerCapacity(WorkerId(f"expert-{i}"), slots * 1000), **changes)
        for i in range(num)
    ]


def spread(num_workers: int, num_experts: int = NUM_EXPERTS) -> Placement:
    names = [one.worker for one in workers(num_workers)]
    return plan_initial_placement(moe_layers=[1], num_experts=num_experts, workers=names)


def load_of(per_expert: list[int], steps: int = 64) -> NDArray[np.number]:
    return np.tile(np.array(per_expert, np.uint16), (steps, 1, 1))


def test_a_level_load_moves_nothing_even_where_slots_are_free() -> None:
    plan = plan_rebalance(load_of([10] * 8), spread(4), workers(4, slots=5), RULE)
    assert plan.is_hold
    assert "no move pays for itself" in plan.reasons


def test_an_empty_window_holds_and_says_so() -> None:
    plan = plan_rebalance(np.zeros((0, 1, 8), np.uint16), spread(4), workers(4), RULE)
    assert plan.is_hold
    assert "no load was recorded" in plan.reasons


def test_a_hot_expert_gets_copies_elsewhere() -> None:
    plan = plan_rebalance(load_of([80] + [10] * 7), spread(4), workers(4), RULE)
    (change,) = plan.changes
    assert len(change.placement.holders[0]) >= 2
    assert change.par_after < 1.3 < change.par_before
    assert change.gain_s > change.cost_s > 0


def test_a_gain_that_does_not_pay_for_the_copies_is_left() -> None:
    load = load_of([80] + [10] * 7)
    slow = replace(RULE, bytes_per_s=1.0)
    assert plan_rebalance(load, spread(4), workers(4), slow).is_hold
    short = replace(RULE, horizon_steps=0)
    assert plan_rebalance(load, spread(4), workers(4), short).is_hold


def test_experts_of_a_lost_worker_are_placed_again_whatever_it_costs() -> None:
    plan = plan_rebalance(
        np.zeros((0, 1, 8), np.uint16), spread(4), workers(3), replace(RULE, bytes_per_s=1e-3)
    )
    (change,) = plan.changes
    assert {one.worker for one in change.removed} == {"expert-3"}
    assert all(change.placement.holders)
    assert any("lack copies" in reason for reason in plan.reasons)


def test_a_second_copy_of_every_expert_stands_in_another_domain_where_possible() -> None:
    fleet = [replace(one, domain="ab"[i // 2]) for i, one in enumerate(workers(4, slots=4))]
    plan = plan_rebalance(load_of([10] * 8), spread(4), fleet, replace(RULE, min_copies=2))
    domains = {one.worker: one.domain for one in fleet}
    for holders in apply_changes(spread(4), plan.changes).layers[0].holders:
        assert {domains[worker] for worker in holders} == {"a", "b"}


def test_a_placement_above_the_budget_shrinks_to_it() -> None:
    both = tuple((WorkerId("expert-0"), WorkerId("expert-1")) for _ in range(NUM_EXPERTS))
    placement = Placement((LayerPlacement(1, Epoch(3), both),))
    plan = plan_rebalance(load_of([10] * 8), placement, workers(2, slots=5), RULE)
    (change,) = plan.changes
    assert [len(change.placement.experts_of(one.worker)) for one in workers(2)] == [5, 5]
    assert not change.added


def test_fast_workers_get_more_load() -> None:
    fleet = [replace(one, speed=3.0 if i == 0 else 1.0) for i, one in enumerate(workers(4, 5))]
    plan = plan_rebalance(load_of([30] * 8), spread(4), fleet, RULE)
    (change,) = plan.changes
    assert change.par_after < change.par_before
    assert len(change.placement.experts_of(WorkerId("expert-0"))) == 5


def test_only_the_load_since_the_last_shift_counts() -> None:
    rng = np.random.default_rng(0)
    old, new = [100] + [10] * 7, [10] * 7 + [100]
    load = np.concatenate([load_of(old, 96), load_of(new, 32)])
    load = rng.poisson(load).astype(np.uint16)
    plan = plan_rebalance(load, spread(4), workers(4), RULE)
    assert plan.num_steps == 32
    assert len(plan.changes[0].placement.holders[7]) > 1
    assert len(plan.changes[0].placement.holders[0]) == 1


def test_quantiles_place_for_the_busy_steps() -> None:
    # Experts 0 and 1 share a worker and are busy together in one step of ten.
    load = load_of([10] * 8, 60)
    load[::10, 0, 0] = load[::10, 0, 4] = 60
    rare = replace(RULE, quantile=0.99, bytes_per_s=1e8)
    usual = replace(RULE, quantile=0.5, bytes_per_s=1e8)
    fleet = workers(4, slots=2)
    assert plan_rebalance(load, spread(4), fleet, usual).is_hold
    (change,) = plan_rebalance(load, spread(4), fleet, rare).changes
    holders = change.placement.holders
    assert holders[0] != holders[4]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (np.zeros((4, 8), np.uint16), "shape"),
        (np.zeros((4, 2, 8), np.uint16), "shape"),
        (np.zeros((4, 1, 9), np.uint16), "shape"),
        (np.full((4, 1, 8), np.nan), "no numbers"),
        (np.full((4, 1, 8), -1), "negative"),
        (np.full((4, 1, 8), "a"), "type"),
    ],
)
def test_windows_that_are_no_load_are_refused(load: NDArray[np.number], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        plan_rebalance(load, spread(4), workers(4), RULE)


def test_budgets_that_hold_no_copy_of_each_say_how_much_is_missing() -> None:
    with pytest.raises(PlacementError, match="2,000 bytes are missing"):
        plan_rebalance(load_of([10] * 8), spread(2), workers(2, slots=3), RULE)


@pytest.mark.parametrize(
    ("fleet", "rule", "message"),
    [
        ([], RULE, "no expert worker"),
        (workers(1) * 2, RULE, "twice"),
        (workers(1, slots=20), replace(RULE, min_copies=2), "there are 1"),
        (workers(4, speed=0.0), RULE, "speed"),
        (workers(4), replace(RULE, expert_bytes=0), "0 bytes"),
        (workers(4), replace(RULE, bytes_per_s=0.0), "cannot be sent"),
    ],
)
def test_fleets_that_cannot_hold_experts_are_refused(
    fleet: list[WorkerCapacity], rule: RebalanceRule, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        plan_rebalance(load_of([10] * 8), spread(4), fleet, rule)


def test_remainders_of_budgets_go_round_the_layers() -> None:
    slots = plan_slots(
        [WorkerCapacity(WorkerId(f"w{i}"), 7000) for i in range(3)],
        expert_bytes=1000,
        num_layers=3,
        num_experts=7,
        min_copies=1,
    )
    assert slots.sum(axis=1).tolist() == [7, 7, 7]
    assert slots.sum(axis=0).tolist() == [7, 7, 7]
