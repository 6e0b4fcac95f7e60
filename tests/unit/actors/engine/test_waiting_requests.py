"""Requests that own no memory, and deadlines: the queue, the heap and the rows of running ones."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.block_pool import BlockPool
from actors.engine.choosing import TokenChoice
from actors.engine.deadline_heap import DeadlineHeap
from actors.engine.preemption import PAUSE_PATIENCE_STEPS
from actors.engine.request import EngineRequest, Rank
from actors.engine.request_queue import RequestQueue
from actors.engine.running_rows import RunningRows
from tests.fakes.engine_rig import key, score, submit


def make(
    number: int,
    *,
    at: float = 0.0,
    priority: int = 0,
    credit: int = 10,
    deadline: float | None = None,
    is_score: bool = False,
) -> EngineRequest:
    made = score(f"r{number}", [1] * 40) if is_score else submit(f"r{number}", [1] * 20)
    message = msgspec.structs.replace(made, priority=priority)
    return EngineRequest(
        submit=message,
        arrived_at=at,
        number=number,
        choice=TokenChoice(message, None),
        deadline=deadline,
        credit=credit,
    )


arrivals = st.lists(
    st.tuples(st.sampled_from([0.0, 30.0, 60.0, 90.0]), st.integers(-1, 1), st.integers(0, 1)),
    max_size=10,
)


@given(arrivals, st.data())
def test_the_heads_are_the_first_in_rank_of_those_that_could_run(arrivals, data) -> None:
    queue = RequestQueue()
    requests = [
        make(number, at=at, priority=priority, credit=credit)
        for number, (at, priority, credit) in enumerate(arrivals)
    ]
    for request in requests:
        queue.add(request)
    for request in list(requests):
        match data.draw(st.sampled_from(["", "remove", "pause", "credit", "add again"])):
            case "remove":
                queue.remove(request)
                queue.remove(request)
                requests.remove(request)
            case "pause":
                request.credit = 0
                queue.refresh(request)
            case "credit":
                request.credit = 5
                queue.refresh(request)
            case "add again":
                queue.add(request)
    held = {request.key for request in requests if data.draw(st.booleans())}
    could = [one for one in requests if one.credit > 0 and one.key not in held]
    expected = sorted(could, key=lambda one: one.rank)
    assert len(queue) == len(requests)
    assert set(map(id, queue)) == set(map(id, requests))
    for num_heads in (0, 1, 3, 20):
        assert queue.heads(num_heads, held) == expected[:num_heads]


def test_one_that_is_not_queued_is_left_alone() -> None:
    queue, twin = RequestQueue(), make(1)
    queue.add(make(1))
    queue.remove(twin)
    queue.refresh(twin)
    assert (len(queue), len(queue.heads(5))) == (1, 1)
    assert queue.get(key("r2")) is None


deadlines = st.lists(st.one_of(st.none(), st.floats(0, 100)), max_size=200)


@settings(max_examples=50)
@given(deadlines, st.sets(st.integers(0, 199)), st.floats(0, 100))
def test_those_whose_deadline_has_passed_come_once_and_in_order(deadlines, ended, now) -> None:
    heap = DeadlineHeap()
    requests = [make(number, deadline=one) for number, one in enumerate(deadlines)]
    for request in requests:
        heap.add(request)
        request.is_ended = request.number in ended
    live = [one for one in requests if one.deadline is not None and not one.is_ended]
    assert heap.first() == min((one.deadline for one in live), default=None)
    due = sorted(
        (one for one in live if one.deadline <= now), key=lambda one: (one.deadline, one.number)
    )
    assert heap.pop_passed(now) == due
    assert heap.pop_passed(now) == []


def test_requests_that_ended_long_before_a_far_deadline_are_forgotten() -> None:
    heap = DeadlineHeap()
    heap.add(make(0, deadline=1e8))
    for number in range(1, 1000):
        request = make(number, deadline=1e9)
        heap.add(request)
        request.is_ended = True
    assert len(heap) <= 65
    assert heap.first() == 1e8


@settings(max_examples=60)
@given(st.data())
def test_the_view_is_that_of_the_requests(data) -> None:
    rows, pool = RunningRows(6), BlockPool(60)
    running: dict[object, EngineRequest] = {}
    free = list(range(6))
    for number in range(data.draw(st.integers(0, 25))):
        action = data.draw(st.sampled_from(["add", "change", "remove"]))
        if action == "add" and free:
            request = make(
                number,
                at=data.draw(st.sampled_from([0.0, 60.0])),
                priority=data.draw(st.integers(-1, 1)),
                is_score=data.draw(st.booleans()),
            )
            request.slot = free.pop(data.draw(st.integers(0, len(free) - 1)))
            request.blocks = pool.allocate(data.draw(st.integers(1, 3)))
            running[request.key] = request
            rows.add(request)
        elif running:
            request = data.draw(st.sampled_from(list(running.values())))
            if action == "remove":
                rows.remove(request.key)
                rows.remove(request.key)
                del running[request.key]
                free.append(request.slot)
                pool.free(request.blocks)
            else:
                request.credit = data.draw(st.integers(0, 40))
                request.computed = data.draw(st.integers(0, 20))
                request.last_step = data.draw(st.integers(0, 100))
                request.last_saved = data.draw(st.integers(0, 20))
                request.is_leaving = data.draw(st.booleans())
                request.generated = [1] * data.draw(st.integers(0, 3))
                rows.update(request)
    held = {name for name in running if data.draw(st.booleans())}
    view = rows.view(running, held, pool, is_tight=True)
    order = sorted(running.values(), key=lambda one: one.rank)
    assert view.keys == tuple(one.key for one in order)
    expected = {
        "num_prompt": [one.num_prompt for one in order],
        "num_known": [one.num_known for one in order],
        "computed": [one.computed for one in order],
        "row_limit": [one.row_limit for one in order],
        "last_saved": [one.last_saved for one in order],
        "last_step": [one.last_step for one in order],
        "priority": [one.submit.priority for one in order],
        "num_blocks": [len(one.blocks) for one in order],
        "num_private": [len(one.blocks) for one in order],
        "num_slots": [int(not one.is_leaving) for one in order],
        "can_run": [not one.is_paused and one.key not in held for one in order],
        "wants_rows": [one.wants_rows for one in order],
    }
    for name, values in expected.items():
        assert np.array_equal(getattr(view, name), values), name
    for one in order:
        assert rows.count_ahead(one.rank) == order.index(one)
    assert rows.count_ahead(Rank(1e9, 0)) == len(order)


def test_a_request_without_a_slot_is_no_row() -> None:
    rows = RunningRows(2)
    rows.add(make(1))
    rows.update(make(2))
    assert len(rows.view({}, (), BlockPool(1), is_tight=False)) == 0


@pytest.mark.parametrize(
    ("priority", "step", "credit", "expected"),
    [
        (0, 0, 5, False),
        (-1, 0, 5, True),
        (0, PAUSE_PATIENCE_STEPS - 1, 0, False),
        (0, PAUSE_PATIENCE_STEPS, 0, True),
    ],
    ids=["equal", "more urgent", "paused for a moment", "paused for long"],
)
def test_who_might_give_way(priority: int, step: int, credit: int, expected: bool) -> None:
    rows = RunningRows(2)
    busy, other = make(1, priority=-50), make(2, credit=credit)
    busy.slot, other.slot = 0, 1
    rows.add(busy)
    rows.add(other)
    assert rows.can_displace(priority, step) == expected
