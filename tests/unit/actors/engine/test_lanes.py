"""The order in which lanes begin, wait and go on."""

from __future__ import annotations

import itertools

import pytest
import torch

from actors.engine.lanes import run_lanes
from configs.errors import TransportTimeoutError, WorkerError
from model.batch import Segment, StepBatch
from tests.fakes.fake_decoder import FakeDecoder, FakeRouter, fake_memory

NUM_LAYERS = 2


def lane_generators(router: FakeRouter, num_lanes: int = 2) -> list:
    memory = fake_memory(num_blocks=num_lanes, block_size=16, num_slots=num_lanes)
    decoder = FakeDecoder(vocab_size=11, num_layers=NUM_LAYERS)
    generators = []
    for lane in range(num_lanes):
        memory.zero_slot(lane)
        batch = StepBatch(
            token_ids_T=torch.tensor([lane + 1]),
            segments=(Segment(0, 1, 0, False, lane, (lane,)),),
            logit_rows_R=torch.tensor([0]),
        )
        generators.append(decoder.run(batch, memory, router.lane(step=1, lane=lane)))
    return generators


def run(router: FakeRouter, generators: list | None = None) -> list:
    ticks = itertools.count()
    lanes = lane_generators(router) if generators is None else generators
    return list(run_lanes(lanes, router, clock=lambda: float(next(ticks)), wait_timeout_s=5.0))


def test_both_lanes_begin_before_the_first_finishes() -> None:
    router = FakeRouter()
    run(router)
    assert router.events[:2] == [("begin", 0, 0), ("begin", 1, 0)]
    assert router.events.index(("finish", 0, 0)) > 1


@pytest.mark.parametrize("first", [0, 1], ids=["decode", "prefill"])
def test_the_lane_whose_answer_comes_first_goes_on_first(first: int) -> None:
    router = FakeRouter(choose=lambda open_: next((t for t in open_ if t.lane == first), open_[0]))
    results = run(router)
    assert router.events[2] == ("finish", first, 0)
    assert [result.lane for result in results] == [first, 1 - first]


def test_a_lane_keeps_going_while_the_other_waits() -> None:
    router = FakeRouter(choose=lambda open_: next((t for t in open_ if t.lane == 1), open_[0]))
    run(router)
    last_of_fast = router.events.index(("finish", 1, NUM_LAYERS - 1))
    assert last_of_fast < router.events.index(("finish", 0, 0))


def test_of_two_ready_lanes_the_one_that_waited_longer_goes_on() -> None:
    router = FakeRouter()
    generators = lane_generators(router)
    original = router.lane

    class AlwaysReady(list):
        def __contains__(self, ticket: object) -> bool:
            return True

    router.ready = AlwaysReady()
    assert original is not None
    run(router, generators)
    finishes = [lane for event, lane, _ in router.events if event == "finish"]
    assert finishes == [0, 1, 0, 1]


def test_a_failing_lane_leaves_the_other_alone() -> None:
    router = FakeRouter(
        fail=lambda _step, lane, layer: WorkerError("gone") if (lane, layer) == (0, 1) else None
    )
    results = {result.lane: result for result in run(router)}
    assert isinstance(results[0].error, WorkerError)
    assert results[0].logits_RV is None
    assert results[1].error is None
    assert results[1].logits_RV is not None


def test_a_wait_without_an_answer_fails_the_lane_that_waited_longest() -> None:
    asked: list[list[int]] = []

    def choose(open_: list) -> object:
        asked.append([ticket.lane for ticket in open_])
        return None if len(asked) == 1 else open_[-1]

    router = FakeRouter(choose=choose)
    results = run(router)
    assert (results[0].lane, type(results[0].error)) == (0, TransportTimeoutError)
    assert (results[1].lane, results[1].error) == (1, None)


def test_an_unforeseen_error_closes_all_lanes() -> None:
    closed: list[int] = []

    def lane(index: int):
        router_lane = router.lane(step=1, lane=index)
        try:
            yield router_lane.begin(0, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))
            raise RuntimeError("bug")
        finally:
            closed.append(index)

    router = FakeRouter()
    with pytest.raises(RuntimeError, match="bug"):
        run(router, [lane(0), lane(1)])
    assert sorted(closed) == [0, 1]


def test_no_lanes_give_no_results() -> None:
    assert run(FakeRouter(), []) == []
