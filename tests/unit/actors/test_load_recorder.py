"""The recorder's rows are what an obvious twin counts, and readers lose nothing silently."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.load_recorder import LoadRecorder
from configs.errors import PlacementError

LAYERS = (1, 2, 4)
NUM_EXPERTS = 5


def make(num_rows: int = 4, max_step_tokens: int = 512) -> LoadRecorder:
    ticks = iter(range(1_000_000))
    return LoadRecorder(
        layers=LAYERS,
        num_experts=NUM_EXPERTS,
        num_rows=num_rows,
        max_step_tokens=max_step_tokens,
        clock=lambda: float(next(ticks)),
    )


def picks(*experts: int) -> np.ndarray:
    return np.array(experts, np.uint32)


dispatches = st.tuples(
    st.sampled_from(LAYERS), st.lists(st.integers(0, NUM_EXPERTS - 1), max_size=6)
)


@given(
    st.lists(st.one_of(dispatches, st.sampled_from(["end", "forget"])), min_size=1, max_size=60),
    st.integers(1, 6),
)
def test_rows_equal_a_plain_count_of_what_was_not_given_up(
    events: list[tuple[int, list[int]] | str], num_rows: int
) -> None:
    recorder = make(num_rows)
    expected: list[np.ndarray] = []
    step, is_touched = np.zeros((len(LAYERS), NUM_EXPERTS), int), False
    for event in events:
        if event == "end":
            recorder.end_step()
            if is_touched:
                expected.append(step)
            step, is_touched = np.zeros_like(step), False
        elif event == "forget":
            recorder.forget_step()
            step, is_touched = np.zeros_like(step), False
        else:
            layer, experts = event
            recorder.count(layer, picks(*experts))
            for expert in experts:
                step[LAYERS.index(layer), expert] += 1
            is_touched = True
    rows = recorder.read(0)
    kept = expected[-num_rows:]
    assert rows.num_dropped == len(expected) - len(kept) == rows.first
    assert rows.counts_RLE.tolist() == [row.tolist() for row in kept]


def test_rows_are_read_on_from_where_the_last_read_ended() -> None:
    recorder = make(num_rows=8)
    for step in range(5):
        recorder.count(1, picks(step % NUM_EXPERTS))
        recorder.end_step()
    first = recorder.read(0, max_rows=2)
    assert (first.next_row, first.num_left) == (2, 3)
    second = recorder.read(first.next_row)
    assert (second.first, second.next_row, second.num_left) == (2, 5, 0)
    assert len(recorder.read(5).ended_at_R) == 0
    assert np.all(np.diff(np.concatenate([first.ended_at_R, second.ended_at_R])) > 0)


def test_overwritten_rows_are_told_of() -> None:
    recorder = make(num_rows=3)
    for _ in range(10):
        recorder.count(1, picks(0))
        recorder.end_step()
    rows = recorder.read(2)
    assert (rows.first, rows.num_dropped, len(rows.ended_at_R)) == (7, 5, 3)


def test_a_reader_of_an_earlier_life_starts_over() -> None:
    recorder = make()
    recorder.count(1, picks(0))
    recorder.end_step()
    rows = recorder.read(1000)
    assert (rows.first, rows.num_dropped, len(rows.ended_at_R)) == (0, 0, 1)
    assert rows.life == 0.0


def test_large_steps_are_counted_in_32_bits() -> None:
    assert make().read(0).counts_RLE.dtype == np.uint16
    large = make(max_step_tokens=1 << 16)
    large.count(1, np.zeros(1 << 16, np.uint32))
    large.end_step()
    assert large.read(0).counts_RLE[0, 0, 0] == 1 << 16
    assert large.memory_bytes == 5 * len(LAYERS) * NUM_EXPERTS * 4


def test_layers_without_experts_are_refused() -> None:
    with pytest.raises(PlacementError, match="layer 3 has no experts"):
        make().count(3, picks(0))


def test_rows_that_are_read_beside_a_fast_writer_are_whole_or_missing() -> None:
    recorder = make(num_rows=4)
    is_done = threading.Event()

    def write() -> None:
        for step in range(20_000):
            for layer in LAYERS:
                recorder.count(layer, np.full(1 + step % 7, step % NUM_EXPERTS, np.uint32))
            recorder.end_step()
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    after, num_seen, num_dropped = 0, 0, 0
    while not is_done.is_set() or recorder.read(after).num_left:
        rows = recorder.read(after)
        for number, counts_LE in enumerate(rows.counts_RLE, rows.first):
            expected = np.zeros((len(LAYERS), NUM_EXPERTS), int)
            expected[:, number % NUM_EXPERTS] = 1 + number % 7
            np.testing.assert_array_equal(counts_LE, expected)
        after, num_seen = rows.next_row, num_seen + len(rows.ended_at_R)
        num_dropped += rows.num_dropped
    writer.join()
    last = recorder.read(after)
    assert num_seen + num_dropped + len(last.ended_at_R) + last.num_dropped == 20_000
