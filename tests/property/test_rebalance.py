"""Plans for random loads, budgets, speeds, domains and placements keep every constraint."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cluster.control.rebalance import RebalanceRule, apply_changes, plan_rebalance
from cluster.control.worker_slots import WorkerCapacity, plan_slots
from configs.ids import Epoch, WorkerId
from router.placement import LayerPlacement, Placement

BYTES = 1000
RULE = RebalanceRule(expert_bytes=BYTES, bytes_per_s=1e6, step_s=0.01)


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[NDArray[np.number], Placement, list[WorkerCapacity], RebalanceRule]:
    num_workers, num_layers = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 14))
    min_copies = draw(st.integers(1, min(2, num_workers)))
    seed = draw(st.integers(0, 1 << 30))
    rng = np.random.default_rng(seed)
    extra = rng.integers(0, 4, num_workers)
    # Even shares always suffice; what is above makes workers unequal.
    even = -(-num_experts * min_copies // num_workers)
    names = [WorkerId(f"expert-{i}") for i in range(num_workers)]
    workers = [
        WorkerCapacity(
            name,
            int((even + more) * num_layers * BYTES + rng.integers(0, BYTES)),
            speed=float(rng.choice([0.5, 1.0, 1.0])),
            domain=str(rng.choice(["", "a", "b"])),
        )
        for name, more in zip(names, extra, strict=True)
    ]
    pool = [*names, WorkerId("expert-gone")]
    layers = []
    for layer in range(num_layers):
        holders = []
        for _ in range(num_experts):
            num = int(rng.integers(1, min(3, len(pool)) + 1))
            holders.append(
                tuple(WorkerId(str(one)) for one in rng.choice(pool, num, replace=False))
            )
        layers.append(LayerPlacement(layer + 1, Epoch(int(rng.integers(1, 9))), tuple(holders)))
    shape = (draw(st.sampled_from([0, 1, 5, 40])), num_layers, num_experts)
    load = np.maximum(rng.lognormal(3, 1, shape), 0).astype(np.uint16)
    rule = replace(
        RULE,
        min_copies=min_copies,
        is_chosen_per_step=draw(st.booleans()),
        quantile=draw(st.sampled_from([None, 0.5, 0.95])),
    )
    return load, Placement(tuple(layers)), workers, rule


@given(cases())
@settings(max_examples=120, deadline=None)
def test_every_constraint_holds_and_equal_input_gives_equal_output(
    case: tuple[NDArray[np.number], Placement, list[WorkerCapacity], RebalanceRule],
) -> None:
    load, placement, workers, rule = case
    plan = plan_rebalance(load, placement, workers, rule)
    assert plan_rebalance(load, placement, workers, rule) == plan
    new = apply_changes(placement, plan.changes)
    names = {one.worker for one in workers}
    slots_LD = plan_slots(
        workers,
        expert_bytes=rule.expert_bytes,
        num_layers=len(placement.layers),
        num_experts=load.shape[2],
        min_copies=rule.min_copies,
    )
    held: Counter[WorkerId] = Counter()
    for at, placed in enumerate(new.layers):
        for holders in placed.holders:
            assert len(set(holders)) == len(holders) >= rule.min_copies
            assert names.issuperset(holders)
        for index, one in enumerate(workers):
            num = len(placed.experts_of(one.worker))
            assert num <= slots_LD[at, index]
            held[one.worker] += num
    for one in workers:
        assert held[one.worker] * rule.expert_bytes <= one.budget_bytes


@given(cases())
@settings(max_examples=80, deadline=None)
def test_the_differences_applied_to_the_old_placement_give_the_new_one(
    case: tuple[NDArray[np.number], Placement, list[WorkerCapacity], RebalanceRule],
) -> None:
    load, placement, workers, rule = case
    for change in plan_rebalance(load, placement, workers, rule).changes:
        old = placement.layer(change.placement.layer)
        assert change.placement.epoch == old.epoch + 1
        for expert, (before, after) in enumerate(
            zip(old.holders, change.placement.holders, strict=True)
        ):
            added = {one.worker for one in change.added if one.expert == expert}
            removed = {one.worker for one in change.removed if one.expert == expert}
            assert added.isdisjoint(before)
            assert removed.issubset(before)
            assert (set(before) | added) - removed == set(after)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_plan_that_was_carried_out_pays_no_second_time(
    case: tuple[NDArray[np.number], Placement, list[WorkerCapacity], RebalanceRule],
) -> None:
    load, placement, workers, rule = case
    first = plan_rebalance(load, placement, workers, rule)
    second = plan_rebalance(load, apply_changes(placement, first.changes), workers, rule)
    for change in second.changes:
        assert np.isfinite(change.gain_s)
        assert change.gain_s > change.cost_s
        assert change.par_after < change.par_before
