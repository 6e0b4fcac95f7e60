"""Requests that leave their worker and go on at another one; their clients notice nothing."""

import asyncio
import random

import numpy as np
import pytest

from actors.request_channel import Cancel
from cluster.api import request_mover
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from configs import errors
from configs.numerics import EndReason
from tests.fakes.fake_attention_worker import choice_of, place_of
from tests.fakes.gateway_house import (
    answer_of,
    ask,
    ended,
    error_of,
    wait_health,
    wait_idle,
)
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio


class Pair:
    """Two workers, "attention-0" being the one that new requests go to, and their gateway."""

    def __init__(self, first, second, gateway, stub):
        self.first = first
        self.second = second
        self.gateway = gateway
        self.stub = stub

    def moved(self, reason):
        return self.gateway.metrics.value("latentmesh_requests_moved_total", reason=reason)


@pytest.fixture
def pair_of(house):
    """Starts a pair; both workers are manual unless told otherwise."""

    async def start(*, first=None, second=None, **settings):
        workers = [
            await house.worker(name, **{"is_manual": True, **(options or {})})
            for name, options in (("attention-0", first), ("attention-1", second))
        ]
        gateway = await house.gateway(*workers, **settings)
        return Pair(*workers, gateway, await house.stub(gateway))

    return start


async def leave(pair, submit, how):
    """Make the first worker leave a request, one way or the other."""
    if how == "drain":
        await pair.first.drain()
        await pair.first.send_moved(submit)
    else:
        pair.first.drop_connections()


@pytest.mark.parametrize("how", ["drain", "lost"])
async def test_request_goes_on_elsewhere_and_its_client_sees_one_answer(pair_of, how):
    pair = await pair_of(second={"is_manual": False})
    call = pair.stub.Generate(ask(max_tokens=6, sampling=pb.SamplingParams(temperature=1)))
    submit = await pair.first.submitted.get()
    await pair.first.send_tokens(submit, [10, 11, 12])
    await leave(pair, submit, how)
    token_ids, finished = await answer_of(call)
    assert token_ids == [10, 11, 12, 13, 14, 15]
    again = await pair.second.submitted.get()
    assert (again.request_id, again.attempt) == (submit.request_id, 2)
    # What a worker sent just before it was lost may be lost too.
    assert again.generated_ids == [10, 11, 12][: len(again.generated_ids)]
    assert again.sampling == submit.sampling
    assert finished.seed == submit.sampling.seed
    assert finished.usage.output_tokens == 6
    await wait_idle(pair.gateway)
    assert (pair.moved(how), ended(pair.gateway, "finished")) == (1, 1)
    assert ended(pair.gateway, "moved") == 0


async def test_moved_request_carries_tokens_credit_and_the_last_snapshot(pair_of):
    pair = await pair_of()
    call = pair.stub.Generate(ask(max_tokens=6))
    submit = await pair.first.submitted.get()
    await pair.first.send_saved(submit, place_of("attention-1", position=3, name="old"))
    await pair.first.send_tokens(submit, [10, 11])
    await pair.first.send_saved(submit, place_of("attention-1", position=4, name="new"))
    await pair.first.send_moved(submit)
    again = await pair.second.submitted.get()
    assert again.snapshot == place_of("attention-1", position=4, name="new")
    assert (again.generated_ids, again.credit_tokens) == ([10, 11], submit.credit_tokens - 2)
    await pair.second.send_tokens(again, [12])
    await pair.second.send_end(again)
    assert (await answer_of(call))[0] == [10, 11, 12]


async def test_snapshot_in_the_memory_of_a_lost_worker_is_not_asked_for(pair_of):
    pair = await pair_of()
    call = pair.stub.Generate(ask())
    submit = await pair.first.submitted.get()
    await pair.first.send_saved(submit, place_of("attention-0"))
    await pair.first.send_tokens(submit, [10])
    await anext(aiter(call))
    await pair.first.close()
    assert (await pair.second.submitted.get()).snapshot is None
    call.cancel()


async def test_snapshot_in_a_folder_outlives_its_worker(pair_of):
    pair = await pair_of()
    call = pair.stub.Generate(ask())
    submit = await pair.first.submitted.get()
    await pair.first.send_saved(submit, place_of())
    await pair.first.send_tokens(submit, [10])
    await anext(aiter(call))
    await pair.first.close()
    assert (await pair.second.submitted.get()).snapshot == place_of()
    call.cancel()


async def test_worker_that_holds_the_snapshot_is_preferred(house):
    workers = [await house.worker(f"attention-{i}", is_manual=True) for i in range(3)]
    stub = await house.stub(await house.gateway(*workers))
    call = stub.Generate(ask())
    submit = await workers[0].submitted.get()
    await workers[0].send_saved(submit, place_of("attention-2"))
    await workers[0].send_moved(submit)
    assert (await workers[2].submitted.get()).attempt == 2
    call.cancel()


async def test_late_tokens_and_ends_of_an_earlier_attempt_are_dropped(pair_of):
    pair = await pair_of()
    call = pair.stub.Generate(ask())
    submit = await pair.first.submitted.get()
    await pair.first.send_tokens(submit, [10])
    await pair.first.send_moved(submit)
    again = await pair.second.submitted.get()
    await pair.first.send_tokens(submit, [50, 51])
    await pair.first.send_end(submit)
    await pair.second.send_tokens(again, [11])
    await pair.second.send_end(again)
    assert (await answer_of(call))[0] == [10, 11]


async def test_cancellation_reaches_the_worker_that_has_the_request_now(pair_of):
    pair = await pair_of()
    call = pair.stub.Generate(ask())
    submit = await pair.first.submitted.get()
    await pair.first.send_moved(submit)
    again = await pair.second.submitted.get()
    call.cancel()
    assert await pair.second.cancelled.get() == Cancel(again.request_id, 2)
    await wait_idle(pair.gateway)
    assert pair.first.cancelled.empty()
    assert ended(pair.gateway, "cancelled") == 1


async def test_credit_goes_to_the_worker_that_has_the_request_now(pair_of):
    pair = await pair_of(second={"is_manual": False, "burst": 64})
    call = pair.stub.Generate(ask(max_tokens=800, ignore_eos=True))
    submit = await pair.first.submitted.get()
    tokens = [(10 + i) % 64 for i in range(200)]
    await pair.first.send_tokens(submit, tokens)
    await pair.first.send_moved(submit)
    expected = [(10 + i) % 64 for i in range(800)]
    assert (await answer_of(call))[0] == expected


async def test_each_choice_moves_as_a_request_of_its_own(pair_of):
    pair = await pair_of(second={"is_manual": False})
    call = pair.stub.Generate(ask(max_tokens=4, num_choices=3, logprobs=1, prompt_logprobs=0))
    group = await pair.first.submitted.get()
    await pair.first.send_prompt_logprobs(choice_of(group, 0), 1, len(group.token_ids))
    for choice in range(3):
        await pair.first.send_tokens(choice_of(group, choice), [10 + choice])
    for choice in (2, 0):
        await pair.first.send_moved(choice_of(group, choice))
    await pair.first.send_tokens(choice_of(group, 1), [12, 13, 14])
    await pair.first.send_end(choice_of(group, 1))
    tokens, prompt_positions = {0: [], 1: [], 2: []}, []
    async for response in call:
        tokens[response.chunk.choice].extend(response.chunk.token_ids)
        if response.chunk.prompt_logprobs:
            first = response.chunk.prompt_position
            prompt_positions += range(first, first + len(response.chunk.prompt_logprobs))
    assert tokens == {c: [10 + c + i for i in range(4)] for c in range(3)}
    assert prompt_positions == [1, 2]
    moved = [await pair.second.submitted.get() for _ in range(2)]
    assert [submit.request_id for submit in moved] == [f"{group.request_id}.2", group.request_id]
    assert [submit.sampling.choice for submit in moved] == [2, 0]
    assert {submit.num_choices for submit in moved} == {1}
    assert {submit.prompt_logprobs for submit in moved} == {None}


async def test_prompt_logprobs_that_are_missing_come_from_the_next_worker(pair_of):
    pair = await pair_of(second={"is_manual": False})
    call = pair.stub.Generate(ask(1, 2, 3, 4, 5, max_tokens=1, prompt_logprobs=1))
    submit = await pair.first.submitted.get()
    await pair.first.send_prompt_logprobs(submit, 1, 3)
    await pair.first.send_moved(submit)
    seen = []
    async for response in call:
        first = response.chunk.prompt_position
        entries = response.chunk.prompt_logprobs
        seen += [(first + i, entry.logprob) for i, entry in enumerate(entries)]
    assert seen == [(position, -(position + 1) / 8) for position in range(1, 5)]
    assert (await pair.second.submitted.get()).prompt_logprobs == 1


@pytest.mark.parametrize("num_rows", [0, 16, 20])
async def test_score_that_moves_has_every_row_once(pair_of, num_rows):
    pair = await pair_of(second={"is_manual": False})
    ids = list(range(40))
    call = pair.stub.Score(pb.ScoreRequest(token_ids=pb.TokenIds(ids=ids)))
    submit = await pair.first.submitted.get()
    expected = np.tile(np.asarray(ids, dtype="<f4")[:, None], (1, 64))
    if num_rows:
        await pair.first.send_rows(submit, 0, expected[:num_rows])
    await pair.first.send_moved(submit)
    data = b"".join([response.logits async for response in call])
    assert np.array_equal(np.frombuffer(data, dtype="<f4").reshape(40, 64), expected)


async def test_request_waits_for_a_worker_and_goes_on_when_one_is_there(house):
    worker = await house.worker()
    worker.is_manual = True
    gateway = await house.gateway(worker, move_timeout_s=30)
    stub = await house.stub(gateway)
    call = stub.Generate(ask(max_tokens=4))
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, [10])
    await anext(aiter(call))
    await worker.close()
    await wait_health(house, gateway, "NOT_SERVING")
    worker.is_manual = False
    await worker.listen(worker.port)
    assert (await answer_of(call))[0] == [11, 12, 13]
    assert (await worker.submitted.get()).attempt == 2


async def test_request_that_finds_no_worker_in_time_fails_and_says_so(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, move_timeout_s=0.05)
    call = (await house.stub(gateway)).Generate(ask())
    await worker.submitted.get()
    await worker.close()
    error, status = await error_of(call)
    assert (type(error), status.name) == (errors.WorkerError, "UNAVAILABLE")
    assert "move_timeout_s" in error.message
    await wait_idle(gateway)
    assert ended(gateway, "failed") == 1


async def test_request_that_waits_can_be_cancelled(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, move_timeout_s=3000)
    call = (await house.stub(gateway)).Generate(ask())
    await worker.submitted.get()
    await worker.close()
    await wait_health(house, gateway, "NOT_SERVING")
    assert gateway._router._mover.num_waiting == 1
    call.cancel()
    await wait_idle(gateway)
    assert ended(gateway, "cancelled") == 1
    assert gateway._router._mover.num_waiting == 0


async def test_request_that_waits_keeps_its_deadline(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, move_timeout_s=3000)
    call = (await house.stub(gateway)).Generate(ask(), timeout=0.4)
    await worker.submitted.get()
    await worker.close()
    error, status = await error_of(call)
    assert (type(error), status.name) == (errors.DeadlineError, "DEADLINE_EXCEEDED")
    await wait_idle(gateway)
    assert ended(gateway, "deadline") == 1


async def test_gateway_that_stops_fails_requests_that_wait(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, move_timeout_s=3000)
    call = (await house.stub(gateway)).Generate(ask())
    await worker.submitted.get()
    await worker.close()
    await wait_health(house, gateway, "NOT_SERVING")
    assert gateway._router._mover.num_waiting == 1
    await gateway.stop()
    error, _ = await error_of(call)
    assert isinstance(error, errors.ShuttingDownError)


async def test_only_worker_is_used_again_once_it_is_back(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker)
    call = (await house.stub(gateway)).Generate(ask())
    await worker.submitted.get()
    worker.drop_connections()
    again = await worker.submitted.get()
    await worker.send_tokens(again, [10])
    await worker.send_end(again)
    assert (await answer_of(call))[0] == [10]


async def test_request_under_which_workers_are_lost_fails_before_it_has_ended_all(
    pair_of, monkeypatch
):
    monkeypatch.setattr(request_mover, "MAX_LOST_WORKERS", 2)
    pair = await pair_of()
    call = pair.stub.Generate(ask())
    for worker in (pair.first, pair.second, pair.first):
        await worker.submitted.get()
        await wait_connected(pair, 2)
        worker.drop_connections()
    error, _ = await error_of(call)
    assert isinstance(error, errors.WorkerError)
    assert "3 attention workers were lost" in error.message
    assert pair.second.submitted.empty()


async def wait_connected(pair, number):
    await until(lambda: pair.gateway._router.num_connected == number)


async def test_full_workers_are_asked_once_each_before_a_moved_request_fails(house):
    workers = [await house.worker(f"attention-{i}", is_manual=True) for i in range(3)]
    gateway = await house.gateway(*workers)
    call = (await house.stub(gateway)).Generate(ask())
    submit = await workers[0].submitted.get()
    await workers[0].drain()
    await workers[0].send_moved(submit)
    full = {"error_code": "OVERLOADED", "error_message": "the queue is full"}
    for worker in workers[1:]:
        refused = await worker.submitted.get()
        await worker.send_end(refused, EndReason.REJECTED, **full)
    error, _ = await error_of(call)
    assert (type(error), error.message) == (errors.OverloadedError, "the queue is full")
    assert gateway.metrics.value("latentmesh_requests_moved_total", reason="drain") == 1


async def test_request_that_crosses_a_drain_on_its_way_goes_elsewhere(pair_of):
    pair = await pair_of()
    call = pair.stub.Generate(ask())
    submit = await pair.first.submitted.get()
    await pair.first.send_end(submit, EndReason.REJECTED, error_code="NO_WORKER")
    again = await pair.second.submitted.get()
    await pair.second.send_tokens(again, [10])
    await pair.second.send_end(again)
    assert (await answer_of(call))[0] == [10]


async def test_worker_that_refuses_whenever_it_is_back_does_not_hold_a_request_for_ever(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, move_timeout_s=0.3)
    call = (await house.stub(gateway)).Generate(ask())

    async def refuse():
        while True:
            submit = await worker.submitted.get()
            await worker.send_end(submit, EndReason.REJECTED, error_code="NO_WORKER")
            await turn_until(lambda: gateway._router._mover.num_waiting == 1)
            worker.drop_connections()

    refusing = asyncio.create_task(refuse())
    error, _ = await error_of(call)
    refusing.cancel()
    assert isinstance(error, errors.WorkerError)
    assert "move_timeout_s" in error.message


async def test_full_worker_refuses_a_new_request_at_once(pair_of):
    pair = await pair_of()
    call = pair.stub.Generate(ask())
    submit = await pair.first.submitted.get()
    await pair.first.send_end(submit, EndReason.REJECTED, error_code="OVERLOADED")
    assert isinstance((await error_of(call))[0], errors.OverloadedError)
    assert pair.second.submitted.empty()


async def test_draining_worker_gets_no_new_requests_and_finishes_its_own(pair_of):
    pair = await pair_of()
    running = pair.stub.Generate(ask(max_tokens=1))
    submit = await pair.first.submitted.get()
    await pair.first.drain()
    await wait_connected(pair, 1)
    calls = [pair.stub.Generate(ask(max_tokens=1)) for _ in range(3)]
    for _ in calls:
        await pair.second.submitted.get()
    await pair.first.send_tokens(submit, [10])
    await pair.first.send_end(submit)
    assert (await answer_of(running))[0] == [10]
    for call in calls:
        call.cancel()


async def test_worker_that_drains_when_it_is_connected_gets_no_requests(house):
    draining, other = await house.worker("attention-0"), await house.worker("attention-1")
    draining.is_draining = True
    gateway = await house.gateway(draining, other)
    stub = await house.stub(gateway)
    await answer_of(stub.Generate(ask(max_tokens=1)))
    assert draining.submitted.empty()


async def test_gateway_whose_workers_all_drain_says_so(house):
    worker, gateway, stub = await house.simple()
    await worker.drain()
    await wait_health(house, gateway, "NOT_SERVING")
    error, _ = await error_of(stub.Generate(ask()))
    assert isinstance(error, errors.NoWorkerError)


async def test_last_token_whose_end_was_lost_is_replayed_and_not_sent_again(pair_of):
    pair = await pair_of(second={"is_manual": False})
    call = pair.stub.Generate(ask(max_tokens=2))
    submit = await pair.first.submitted.get()
    await pair.first.send_tokens(submit, [10, 11])
    await pair.first.send_moved(submit)
    token_ids, finished = await answer_of(call)
    assert token_ids == [10, 11]
    assert finished.usage.output_tokens == 2


async def test_worker_that_gives_up_requests_without_draining_is_not_asked_for_ever(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker)
    call = (await house.stub(gateway)).Generate(ask())
    for _ in range(request_mover.MAX_LOST_WORKERS + 1):
        await worker.send_moved(await worker.submitted.get())
    error, _ = await error_of(call)
    assert isinstance(error, errors.WorkerError)
    assert worker.submitted.empty()


async def test_request_that_drained_away_waits_for_a_worker_that_does_not_drain(house):
    first, second = [await house.worker(f"attention-{i}", is_manual=True) for i in range(2)]
    gateway = await house.gateway(first, second, move_timeout_s=30)
    call = (await house.stub(gateway)).Generate(ask())
    submit = await first.submitted.get()
    for worker in (first, second):
        await worker.drain()
    await wait_health(house, gateway, "NOT_SERVING")
    await first.send_moved(submit)
    second.is_draining = False
    second.drop_connections()
    again = await second.submitted.get()
    await second.send_tokens(again, [10])
    await second.send_end(again)
    assert (await answer_of(call))[0] == [10]
    assert first.submitted.empty()


async def test_moved_request_goes_only_where_it_fits(house):
    sizes = (1000, 5, 1000)
    workers = [
        await house.worker(f"attention-{i}", is_manual=True, max_request_tokens=size)
        for i, size in enumerate(sizes)
    ]
    gateway = await house.gateway(*workers)
    call = (await house.stub(gateway)).Generate(ask(max_tokens=100))
    submit = await workers[0].submitted.get()
    await workers[0].send_saved(submit, place_of("attention-1"))
    await workers[0].send_moved(submit)
    assert (await workers[2].submitted.get()).attempt == 2
    assert workers[1].submitted.empty()
    call.cancel()


async def turn_until(condition):
    """Let the loop turn until a condition of this thread holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the loop is what makes it come true
            await asyncio.sleep(0)


class Storm:
    """Makes workers drain and get lost, in an order that a seed gives."""

    def __init__(self, workers, gateway, seed):
        self.rng = random.Random(seed)
        self.is_over = False
        self._workers = workers
        self._gateway = gateway

    async def blow(self):
        while not self.is_over:
            await turn_until(lambda: self.is_over or any(w.live for w in self._workers))
            worker = max(self._workers, key=lambda worker: len(worker.live))
            if self.rng.random() < 0.6:
                await worker.drain()
                for submit in list(worker.live.values()):
                    await worker.give_up(submit)
                link = self._gateway._router._connections[worker.name]
                await turn_until(lambda link=link: link.num_open == 0)
            # It comes back as a worker that takes requests.
            worker.is_draining = False
            worker.drop_connections()
            await turn_until(lambda: self._gateway._router.num_connected >= 1)
            for _ in range(self.rng.randrange(100)):
                await asyncio.sleep(0)


async def ask_in_storm(stub, rng):
    """Read one answer, or leave after its first message; whatever comes has to be right."""
    length, num_choices = rng.choice([1, 40, 600, 800]), rng.choice([1, 1, 3])
    is_short = rng.random() < 0.2
    call = stub.Generate(ask(max_tokens=length, num_choices=num_choices, ignore_eos=True))
    answers = [[] for _ in range(num_choices)]
    async for response in call:
        answers[response.chunk.choice].extend(response.chunk.token_ids)
        if is_short:
            call.cancel()
            return
    for choice, answer in enumerate(answers):
        assert answer == [(10 + choice + i) % 64 for i in range(length)]


@pytest.mark.parametrize("seed", range(3))
async def test_answers_survive_a_storm_of_drains_and_losses(house, monkeypatch, seed):
    monkeypatch.setattr(request_mover, "MAX_LOST_WORKERS", 1000)
    workers = [await house.worker(f"attention-{i}") for i in range(3)]
    gateway = await house.gateway(*workers, max_running_requests=64, move_timeout_s=30)
    stub = await house.stub(gateway)
    storm = Storm(workers, gateway, seed)
    blowing = asyncio.create_task(storm.blow())
    try:
        for _ in range(3):
            await asyncio.gather(*(ask_in_storm(stub, storm.rng) for _ in range(20)))
    finally:
        storm.is_over = True
        await blowing
    await wait_idle(gateway)
    assert not gateway._router._mover._moves
    assert ended(gateway, "failed") == 0
    values = [
        gateway.metrics.value("latentmesh_requests_moved_total", reason=reason)
        for reason in ("drain", "lost")
    ]
    assert sum(values) > 0
