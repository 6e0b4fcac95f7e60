"""Replica choice: every pick once, on a holder, and as level as the exact program allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from router.copies import NOBODY, Copies
from router.replica_choice import choose_workers, split_load


def make_copies(holders: list[list[int]], seconds: list[float]) -> Copies:
    most = max(1, *(len(one) for one in holders))
    worker_ER = np.full((len(holders), most), NOBODY, np.int64)
    for expert, workers in enumerate(holders):
        worker_ER[expert, : len(workers)] = workers
    num_E = np.array([len(one) for one in holders], np.int64)
    return Copies(worker_ER, num_E, np.flatnonzero(num_E > 1), np.array(seconds))


def choose(experts: NDArray[np.uint32], copies: Copies) -> NDArray[np.int64]:
    worker_P = np.empty(experts.size, np.int64)
    choose_workers(experts, copies, np.zeros(copies.seconds_W.size), worker_P)
    return worker_P


def exact_time(load_E: NDArray[np.float64], copies: Copies) -> float:
    """The linear program: least time of the slowest worker over all splits."""
    num_experts, most = copies.worker_ER.shape
    num_workers = copies.seconds_W.size
    num = num_experts * most
    held = copies.worker_ER.reshape(-1) != NOBODY
    does = np.zeros((num_workers, num + 1))
    for at in np.flatnonzero(held):
        worker = copies.worker_ER.reshape(-1)[at]
        does[worker, at] = copies.seconds_W[worker]
    does[:, num] = -1
    whole = np.zeros((num_experts, num + 1))
    for expert in range(num_experts):
        whole[expert, expert * most : (expert + 1) * most] = 1
    bounds = [(0, None) if one else (0, 0) for one in held] + [(0, None)]
    cost = np.zeros(num + 1)
    cost[num] = 1
    result = linprog(cost, does, np.zeros(num_workers), whole, load_E, bounds=bounds)
    return float(result.fun)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Copies, NDArray[np.uint32]]:
    num_workers = draw(st.integers(1, 6))
    num_experts = draw(st.integers(1, 12))
    workers = st.lists(st.integers(0, num_workers - 1), min_size=1, max_size=4, unique=True)
    holders = [draw(workers) for _ in range(num_experts)]
    seconds = [draw(st.sampled_from([0.5, 1.0, 1.0, 2.0])) for _ in range(num_workers)]
    picks = draw(st.lists(st.integers(0, num_experts - 1), max_size=200))
    return make_copies(holders, seconds), np.array(picks, np.uint32)


@given(layers())
@settings(max_examples=200, deadline=None)
def test_every_pick_goes_to_a_holder_and_no_worker_is_far_above_the_exact_program(
    layer: tuple[Copies, NDArray[np.uint32]],
) -> None:
    copies, experts = layer
    worker_P = choose(experts, copies)
    for expert, worker in zip(experts, worker_P, strict=True):
        assert worker in copies.worker_ER[expert, : copies.num_E[expert]]
    count_W = np.bincount(worker_P, minlength=copies.seconds_W.size)
    load_E = np.bincount(experts, minlength=copies.num_E.size).astype(float)
    best = exact_time(load_E, copies)
    # Whole picks cost at most one for each replicated expert that a worker holds.
    whole = copies.replicated_M.size * copies.seconds_W.max()
    assert (count_W * copies.seconds_W).max(initial=0) <= 1.03 * best + whole


@given(layers())
@settings(max_examples=100, deadline=None)
def test_splits_keep_all_load_and_reach_the_exact_program(
    layer: tuple[Copies, NDArray[np.uint32]],
) -> None:
    copies, experts = layer
    load_E = np.bincount(experts, minlength=copies.num_E.size).astype(float)
    load_W = np.zeros(copies.seconds_W.size)
    part_ER = np.zeros(copies.worker_ER.shape)
    split_load(load_E, copies, load_W, part_ER)
    assert load_W.sum() == pytest.approx(load_E.sum())
    for expert in copies.replicated_M:
        assert part_ER[expert].sum() == pytest.approx(load_E[expert])
        assert part_ER[expert].min() >= -1e-9
    assert (load_W * copies.seconds_W).max() <= 1.03 * exact_time(load_E, copies) + 1e-9


@given(layers())
@settings(max_examples=50, deadline=None)
def test_the_same_picks_go_to_the_same_workers(layer: tuple[Copies, NDArray[np.uint32]]) -> None:
    copies, experts = layer
    np.testing.assert_array_equal(choose(experts, copies), choose(experts, copies))


def test_workers_that_are_busy_with_the_picks_of_others_get_fewer() -> None:
    copies = make_copies([[0, 1]], [1.0, 1.0])
    worker_P = np.empty(10, np.int64)
    choose_workers(np.zeros(10, np.uint32), copies, np.array([6.0, 0.0]), worker_P)
    assert np.bincount(worker_P).tolist() == [2, 8]


def test_slow_workers_get_fewer() -> None:
    worker_P = choose(np.zeros(12, np.uint32), make_copies([[0, 1]], [2.0, 1.0]))
    assert np.bincount(worker_P).tolist() == [4, 8]


def test_single_picks_of_many_experts_do_not_all_go_to_the_first_worker() -> None:
    copies = make_copies([[0, 1]] * 8, [1.0, 1.0])
    worker_P = choose(np.arange(8, dtype=np.uint32), copies)
    assert np.bincount(worker_P).tolist() == [4, 4]


def test_load_flows_along_a_chain_of_copies() -> None:
    # Expert 0 is hot and shares worker 1 with expert 1, which shares worker 2 with expert 2.
    copies = make_copies([[0, 1], [1, 2], [2, 3]], [1.0] * 4)
    experts = np.repeat(np.arange(3, dtype=np.uint32), [20, 10, 10])
    assert np.bincount(choose(experts, copies)).tolist() == [10, 10, 10, 10]


def test_picks_of_experts_that_nobody_holds_go_nowhere() -> None:
    copies = make_copies([[0, 1], []], [1.0, 1.0])
    assert choose(np.array([1, 0, 1], np.uint32), copies).tolist()[::2] == [NOBODY, NOBODY]
