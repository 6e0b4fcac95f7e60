"""Load windows: merging is exact, quantiles are those of a sort, shifts show at once."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.control.load_shift import count_steps_since_shift
from cluster.control.load_window import LoadWindow
from configs.errors import InvalidRequestError, PlacementError
from configs.ids import WorkerId

LAYERS = (1, 3)
NUM_EXPERTS = 4


def make(num_buckets: int = 8) -> LoadWindow:
    return LoadWindow(layers=LAYERS, num_experts=NUM_EXPERTS, num_buckets=num_buckets, bucket_s=1.0)


def rows(num: int, seed: int) -> np.ndarray:
    shape = (num, len(LAYERS), NUM_EXPERTS)
    return np.random.default_rng(seed).integers(0, 50, shape).astype(np.uint16)


@given(st.integers(1, 3), st.integers(0, 12), st.integers(0, 1000))
def test_merging_is_exact_whatever_the_order_and_whatever_comes_twice(
    num_workers: int, num_rows: int, seed: int
) -> None:
    rng = random.Random(seed)
    total = np.zeros((20, len(LAYERS), NUM_EXPERTS), int)
    pieces = []
    for number in range(num_workers):
        counts = rows(num_rows, seed + number)
        ended_at = np.sort(np.random.default_rng(seed + number).uniform(0, 20, num_rows))
        np.add.at(total, ended_at.astype(int), counts)
        cut = rng.randint(0, num_rows)
        # Each worker's rows come in order and again; those of different workers in any order.
        parts = [(0, cut), (0, cut), (max(0, cut - 2), num_rows)]
        pieces.append([(WorkerId(f"a{number}"), counts, ended_at, part) for part in parts])
    window = make(num_buckets=20)
    while any(pieces):
        worker, counts, ended_at, (start, stop) = rng.choice([p for p in pieces if p]).pop(0)
        window.add(worker, counts[start:stop], ended_at[start:stop], first_row=start)
    got = window.loads()
    np.testing.assert_array_equal(got[got.any(axis=(1, 2))], total[total.any(axis=(1, 2))])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.integers(1, 30), st.integers(0, 1000))
def test_quantiles_are_those_of_a_sort(quantiles: list[float], num: int, seed: int) -> None:
    window = make(num_buckets=30)
    counts = rows(num, seed)
    window.add(WorkerId("a"), counts, np.arange(num) + 0.5, first_row=0)
    ordered = np.sort(counts, axis=0)
    for quantile, found in zip(quantiles, window.quantiles(quantiles), strict=True):
        covered = (np.arange(1, num + 1) / num >= quantile - 1e-9).argmax()
        np.testing.assert_array_equal(found, ordered[covered])


def test_old_buckets_leave_and_late_rows_are_counted_as_late() -> None:
    window = make(num_buckets=2)
    ones = np.ones((3, len(LAYERS), NUM_EXPERTS), np.uint16)
    window.add(WorkerId("a"), ones, np.array([1.5, 2.5, 3.5]), first_row=0)
    assert (window.num_buckets, window.span_s) == (2, 2.0)
    window.add(WorkerId("b"), ones[:1], np.array([1.9]), first_row=0)
    assert window.num_late == 1
    assert window.loads().sum() == 2 * ones[0].size


def test_a_worker_that_began_anew_is_counted_anew() -> None:
    window = make()
    ones = np.ones((1, len(LAYERS), NUM_EXPERTS), np.uint16)
    window.add(WorkerId("a"), ones, np.array([1.0]), first_row=0, life=1.0)
    window.add(WorkerId("a"), ones, np.array([2.0]), first_row=0, life=1.0)
    assert (window.num_late, window.num_buckets) == (1, 1)
    window.add(WorkerId("a"), ones, np.array([3.0]), first_row=0, life=2.0)
    assert (window.num_late, window.num_buckets, window.next_row(WorkerId("a"))) == (1, 2, 1)


def test_an_empty_window_has_no_quantiles_and_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="no load was recorded"):
        make().quantiles([0.5])
    assert make().means().sum() == 0
    assert (make().num_buckets, make().span_s, make().workers) == (0, 0.0, ())


@pytest.mark.parametrize("quantile", [-0.1, 1.1, float("nan")])
def test_quantiles_outside_0_and_1_are_refused(quantile: float) -> None:
    with pytest.raises(InvalidRequestError, match=r"outside 0\.\.1"):
        make().quantiles([quantile])


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(PlacementError, match="the window holds"):
        make().add(WorkerId("a"), np.ones((1, 2, 5), np.uint16), np.zeros(1), first_row=0)


def test_a_change_of_domain_shows_within_one_window() -> None:
    rng = np.random.default_rng(0)
    window = LoadWindow(layers=(1,), num_experts=64, num_buckets=128, bucket_s=1.0)
    old, new = rng.lognormal(3, 0.5, 64), rng.lognormal(3, 0.5, 64)
    means = np.concatenate([np.tile(old, (96, 1)), np.tile(new, (32, 1))])
    window.add(
        WorkerId("a"), rng.poisson(means)[:, None].astype(np.uint16), np.arange(128.0), first_row=0
    )
    assert count_steps_since_shift(window.loads()) == 32


def test_noise_alone_is_no_shift() -> None:
    rng = np.random.default_rng(1)
    load = rng.poisson(rng.lognormal(3, 0.5, (1, 2, 64)) * rng.lognormal(0, 0.3, (128, 2, 64)))
    assert count_steps_since_shift(load.astype(np.uint16)) == 128
    assert count_steps_since_shift(load[:10].astype(np.uint16)) == 10
