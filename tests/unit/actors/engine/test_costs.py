"""What is cheaper: a copy or computing again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.costs import (
    Costs,
    Progress,
    Way,
    decide_move,
    decide_preemption,
    recompute_s,
)

COSTS = Costs(
    prefill_s_per_token=0.001,
    replay_s_per_token=0.1,
    copy_bytes_per_s=1000.0,
    send_bytes_per_s=500.0,
)


def test_an_answer_costs_more_to_compute_again_than_a_prompt() -> None:
    assert recompute_s(Progress(10, 5, 0), COSTS) == pytest.approx(0.51)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(249, Way.RESTORE), (250, Way.RECOMPUTE), (251, Way.RECOMPUTE)],
)
def test_a_copy_is_written_and_read(num_bytes: int, expected: Way) -> None:
    progress = Progress(num_prefilled=0, num_decoded=5, num_bytes=num_bytes)
    assert decide_preemption(progress, COSTS, room_bytes=1000) is expected


@pytest.mark.parametrize(("room", "expected"), [(100, Way.RESTORE), (99, Way.RECOMPUTE)])
def test_a_copy_needs_room(room: int, expected: Way) -> None:
    assert decide_preemption(Progress(0, 50, 100), COSTS, room_bytes=room) is expected


@pytest.mark.parametrize(("num_bytes", "expected"), [(124, Way.RESTORE), (126, Way.RECOMPUTE)])
def test_a_move_sends_the_copy_too(num_bytes: int, expected: Way) -> None:
    assert decide_move(Progress(0, 5, num_bytes), COSTS) is expected


def test_nothing_in_memory_is_never_copied() -> None:
    progress = Progress(0, 0, 0)
    assert decide_preemption(progress, COSTS, room_bytes=1000) is Way.RECOMPUTE
    assert decide_move(progress, COSTS) is Way.RECOMPUTE


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60))
def test_measurements_stay_within_what_was_measured_and_assumed(seconds) -> None:
    costs = Costs(replay_s_per_token=1.0)
    for one in seconds:
        costs = costs.measured(replay_s_per_token=one)
    low, high = min([1.0, *seconds]), max([1.0, *seconds])
    assert low - 1e-9 <= costs.replay_s_per_token <= high + 1e-9
    assert costs.prefill_s_per_token == Costs().prefill_s_per_token


def test_measurements_win_over_the_defaults() -> None:
    costs = Costs()
    for _ in range(300):
        costs = costs.measured(copy_bytes_per_s=5.0, send_bytes_per_s=7.0)
    assert costs.copy_bytes_per_s == pytest.approx(5.0)
    assert costs.send_bytes_per_s == pytest.approx(7.0)
