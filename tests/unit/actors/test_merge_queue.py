from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.merge_queue import MergeQueue


def test_all_frames_of_a_kind_are_served_together() -> None:
    queue: MergeQueue[int, str] = MergeQueue(window_s=0.0)
    for kind, item in ((1, "a"), (2, "b"), (1, "c")):
        queue.push(kind, item, now=0.0)
    assert queue.pop_due(now=0.0) == ["a", "c"]
    assert queue.pop_due(now=0.0) == ["b"]
    assert queue.pop_due(now=0.0) is None


def test_the_kind_that_waits_longest_is_next_however_many_others_come() -> None:
    queue: MergeQueue[int, str] = MergeQueue(window_s=0.0)
    queue.push(5, "old", now=0.0)
    for _ in range(10):
        queue.push(1, "new", now=1.0)
    assert queue.pop_due(now=1.0) == ["old"]


def test_a_window_holds_the_first_frame_back_for_others() -> None:
    queue: MergeQueue[int, str] = MergeQueue(window_s=0.5)
    queue.push(1, "a", now=10.0)
    assert queue.pop_due(now=10.4) is None
    queue.push(1, "b", now=10.4)
    assert queue.next_due() == 10.5
    assert queue.pop_due(now=10.5) == ["a", "b"]
    assert queue.next_due() is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans())))
def test_every_frame_is_served_once_and_a_kind_in_order(steps: list[tuple[int, bool]]) -> None:
    queue: MergeQueue[int, tuple[int, int]] = MergeQueue(window_s=0.0)
    served: list[tuple[int, int]] = []
    for number, (kind, should_pop) in enumerate(steps):
        queue.push(kind, (kind, number), now=float(number))
        if should_pop:
            served += queue.pop_due(now=float(number)) or []
    while (items := queue.pop_due(now=1e9)) is not None:
        served += items
    assert len(queue) == 0
    assert sorted(number for _, number in served) == list(range(len(steps)))
    for kind in range(4):
        numbers = [number for own, number in served if own == kind]
        assert numbers == sorted(numbers)
