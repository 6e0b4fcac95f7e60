"""Requests whose client leaves, whose deadline passes or whose worker is lost."""

import asyncio
import contextlib
import random

import grpc
import grpc.aio
import numpy as np
import pytest

from actors.request_channel import Cancel, Submit, Usage
from cluster.api.gateway import AttentionEndpoint, Gateway
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.generated.latentmesh.v1 import inference_pb2_grpc
from configs import errors
from configs.ids import WorkerId
from configs.numerics import EndReason
from tests.fakes.gateway_house import (
    FixedTopology,
    answer_of,
    ask,
    ended,
    error_of,
    http_get,
    wait_health,
    wait_idle,
)

pytestmark = pytest.mark.asyncio


async def test_cancelled_call_is_cancelled_at_the_worker(house):
    worker, gateway, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, [5])
    await call.read()
    call.cancel()
    assert await worker.cancelled.get() == Cancel(submit.request_id, submit.attempt)
    await wait_idle(gateway)
    assert ended(gateway, "cancelled") == 1


async def test_call_cancelled_before_its_first_token_is_cancelled_at_the_worker(house):
    worker, gateway, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    call.cancel()
    assert (await worker.cancelled.get()).request_id == submit.request_id
    await wait_idle(gateway)


async def test_deadline_travels_to_the_worker_and_ends_the_call(house):
    worker, gateway, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask(), timeout=0.3)
    submit = await worker.submitted.get()
    assert 0 < submit.timeout_s <= 0.3
    error, status = await error_of(call)
    assert (type(error), status.name) == (errors.DeadlineError, "DEADLINE_EXCEEDED")
    assert (await worker.cancelled.get()).request_id == submit.request_id
    await wait_idle(gateway)
    assert ended(gateway, "deadline") == 1


async def test_deadline_that_the_worker_sees_first_says_what_was_done(house):
    worker, _, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask(), timeout=30)
    submit = await worker.submitted.get()
    await worker.send_end(submit, EndReason.DEADLINE, usage=Usage(output_tokens=17, total_s=30.0))
    error, status = await error_of(call)
    assert status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "17 tokens" in error.message


async def test_call_without_deadline_has_no_timeout(house):
    worker, _, stub = await house.simple()
    await answer_of(stub.Generate(ask(max_tokens=1)))
    assert (await worker.submitted.get()).timeout_s is None


async def test_client_that_vanishes_is_cancelled_at_the_worker(house):
    worker, gateway, _ = await house.simple(is_manual=True)
    relay = await Relay.start(gateway.bound.grpc)
    channel = grpc.aio.insecure_channel(relay.address)
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(ask())
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, [5])
    await call.read()
    await relay.close()
    assert (await worker.cancelled.get()).request_id == submit.request_id
    await wait_idle(gateway)
    assert ended(gateway, "cancelled") == 1
    await channel.close()


class Relay:
    """Bytes between a client and a gateway, to be cut."""

    @classmethod
    async def start(cls, target):
        relay = cls()
        host, port = target.rsplit(":", 1)
        relay._target = (host, int(port))
        relay._writers = []
        relay._tasks = []
        relay._server = await asyncio.start_server(relay._accept, "127.0.0.1", 0)
        relay.address = f"127.0.0.1:{relay._server.sockets[0].getsockname()[1]}"
        return relay

    async def _accept(self, reader, writer):
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        self._writers += [writer, target_writer]
        self._tasks = [
            asyncio.create_task(self._copy(reader, target_writer)),
            asyncio.create_task(self._copy(target_reader, writer)),
        ]

    async def _copy(self, reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def close(self):
        for task in self._tasks:
            task.cancel()
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()


async def test_reader_that_does_not_read_stops_the_worker_and_misses_nothing(house):
    num_tokens = 150_000
    worker = await house.worker(burst=64, vocab_size=160_000, max_request_tokens=200_000)
    gateway = await house.gateway(worker, vocab_size=160_000, context_tokens=200_000)
    # gRPC would let the window grow to megabytes; this client takes 64 KiB, the standard's default.
    reader = await house.stub(gateway, **{"grpc.http2.bdp_probe": 0})
    clock = await house.stub(gateway)
    call = reader.Generate(ask(max_tokens=num_tokens, ignore_eos=True))
    responses = aiter(call)
    token_ids = list((await anext(responses)).chunk.token_ids)
    num_sent = -1
    while not (worker.is_starved and worker.num_sent == num_sent):
        num_sent = worker.num_sent
        assert num_sent < num_tokens
        for _ in range(20):
            await clock.GetTopology(pb.GetTopologyRequest())
    rest, finished = await answer_of(responses)
    assert finished.usage.output_tokens == num_tokens
    assert token_ids + rest == [(10 + index) % 160_000 for index in range(num_tokens)]


async def test_score_that_nobody_reads_holds_up_no_other_stream_and_misses_nothing(house):
    num_rows, vocab_size = 100, 100_000
    worker = await house.worker(vocab_size=vocab_size)
    gateway = await house.gateway(worker, vocab_size=vocab_size)
    # This client takes 64 KiB before it reads: less than one row.
    reader = await house.stub(gateway, **{"grpc.http2.bdp_probe": 0})
    other = await house.stub(gateway)
    call = reader.Score(pb.ScoreRequest(token_ids=pb.TokenIds(ids=range(num_rows))))
    num_sent = -1
    while not (worker.is_starved and worker.num_sent == num_sent):
        num_sent = worker.num_sent
        for _ in range(20):
            await other.GetTopology(pb.GetTopologyRequest())
    assert 0 < num_sent < num_rows
    token_ids, finished = await answer_of(other.Generate(ask(max_tokens=600, ignore_eos=True)))
    assert token_ids == list(range(10, 610))
    assert finished.usage.output_tokens == 600
    position = 0
    async for response in call:
        rows = np.frombuffer(response.logits, dtype="<f4").reshape(-1, vocab_size)
        assert response.first_position == position
        assert (rows == np.arange(position, position + len(rows))[:, None]).all()
        position += len(rows)
    assert position == num_rows
    await wait_idle(gateway)
    assert ended(gateway, "finished") == 1  # The answer; scores are counted apart.


async def test_score_that_nobody_reads_is_cancelled_when_its_client_leaves(house):
    worker = await house.worker(vocab_size=100_000)
    gateway = await house.gateway(worker, vocab_size=100_000)
    reader = await house.stub(gateway, **{"grpc.http2.bdp_probe": 0})
    call = reader.Score(pb.ScoreRequest(token_ids=pb.TokenIds(ids=range(100))))
    submit = await worker.submitted.get()
    await call.read()
    call.cancel()
    assert await worker.cancelled.get() == Cancel(submit.request_id, submit.attempt)
    await wait_idle(gateway)


async def test_lost_worker_ends_its_requests_as_unavailable_after_what_was_received(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, move_timeout_s=0)
    stub = await house.stub(gateway)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, [5])
    responses = aiter(call)
    assert list((await anext(responses)).chunk.token_ids) == [5]
    worker.drop_connections()
    error, status = await error_of(responses)
    assert (type(error), status.name) == (errors.WorkerError, "UNAVAILABLE")
    assert error.retryable
    await wait_idle(gateway)
    assert ended(gateway, "failed") == 1


async def test_gateway_reconnects_to_a_worker_that_is_back(house):
    worker, gateway, stub = await house.simple()
    await worker.connected.get()
    worker.drop_connections()
    await worker.connected.get()
    await wait_health(house, gateway, "SERVING")
    assert (await answer_of(stub.Generate(ask(max_tokens=1))))[0] == [10]
    assert gateway.metrics.value(
        "latentmesh_gateway_connections_lost_total", worker="attention-0"
    ) == 1  # fmt: skip


async def test_without_any_worker_requests_are_unavailable_and_health_says_so(house):
    worker, gateway, stub = await house.simple()
    await worker.close()
    await wait_health(house, gateway, "NOT_SERVING")
    error, status = await error_of(stub.Generate(ask()))
    assert (type(error), status.name) == (errors.NoWorkerError, "UNAVAILABLE")
    assert (await http_get(gateway, "/health"))[0] == 503


async def test_gateway_serves_while_one_of_two_workers_cannot_be_reached(house):
    worker, gone = await house.worker("attention-0"), await house.worker("attention-1")
    await gone.close()
    gateway = await house.gateway(worker, gone)
    stub = await house.stub(gateway)
    assert (await answer_of(stub.Generate(ask(max_tokens=1))))[0] == [10]


async def test_gateway_does_not_start_without_any_worker(house):
    worker = await house.worker()
    await worker.close()
    with pytest.raises(errors.TransportError, match="attention-0"):
        await house.gateway(worker)


async def test_worker_of_another_name_is_not_taken(house):
    worker = await house.worker("attention-7")
    worker.name = WorkerId("attention-0")
    with pytest.raises(errors.TransportError, match="expected attention worker attention-1"):
        await Gateway.start(
            (await house.gateway(worker))._settings,
            [AttentionEndpoint(WorkerId("attention-1"), worker.address)],
            FixedTopology(),
        )


async def test_requests_go_to_the_worker_with_the_fewest(house):
    workers = [await house.worker(f"attention-{index}", is_manual=True) for index in (1, 0)]
    stub = await house.stub(await house.gateway(*workers))
    calls = []
    for worker in (workers[1], workers[0], workers[1]):
        calls.append(stub.Generate(ask()))
        await worker.submitted.get()
    for call in calls:
        call.cancel()


async def test_every_accepted_request_ends_once_whatever_happens_to_it(house):
    rng = random.Random(7)
    worker = await house.worker()
    gateway = await house.gateway(worker, max_running_requests=20)
    stub = await house.stub(gateway)
    num_requests = 80

    async def live(index):
        timeout = rng.choice([None, None, 0.001, 0.02])
        call = stub.Generate(
            ask(max_tokens=rng.choice([1, 50, 600]), ignore_eos=True), timeout=timeout
        )
        num_chunks = rng.choice([0, 1, 5, 1000])
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            for _ in range(num_chunks):
                if await call.read() is grpc.aio.EOF:
                    break
        call.cancel()
        if index % 20 == 19:
            worker.drop_connections()

    for start in range(0, num_requests, 20):
        await asyncio.gather(*(live(index) for index in range(start, start + 20)))
        await wait_health(house, gateway, "SERVING")
    await wait_idle(gateway)
    reasons = {reason: ended(gateway, reason) for reason in EndReason}
    submits = {message.request_id for message in worker.received if isinstance(message, Submit)}
    assert len(submits) <= sum(reasons.values()) <= num_requests
    assert reasons[EndReason.FINISHED] > 0
    assert reasons[EndReason.CANCELLED] > 0
    assert sum(reasons.values()) == next(gateway._router._counter) - 1
