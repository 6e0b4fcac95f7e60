"""The synchronous client against a gateway in the same process."""

import asyncio

import pytest

from cluster.api.answers import Chunk, Finished
from cluster.api.client import LatentmeshClient
from cluster.api.params import GenerateParams, ScoreParams
from configs import errors
from configs.numerics import FinishReason
from tests.fakes.gateway_house import VIEW, FixedTopology, wait_idle

pytestmark = pytest.mark.asyncio


async def use(gateway, action):
    """Run `action(client)` in a thread, as a program without an event loop would."""

    def act():
        with LatentmeshClient(gateway.bound.grpc) as client:
            return action(client)

    return await asyncio.to_thread(act)


async def test_generate_yields_chunks_and_the_end(house):
    _, gateway, _ = await house.simple()
    params = GenerateParams([1, 2], max_tokens=5)
    *chunks, last = await use(gateway, lambda client: list(client.generate(params)))
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert [token for chunk in chunks for token in chunk.token_ids] == [10, 11, 12, 13, 14]
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.usage.output_tokens) == (FinishReason.LENGTH, 5)


async def test_closing_the_iterator_cancels_at_the_worker(house):
    worker, gateway, _ = await house.simple(is_manual=True)

    def first_of(client):
        answer = client.generate(GenerateParams([1, 2]))
        chunk = next(answer)
        answer.close()
        return chunk

    using = asyncio.create_task(use(gateway, first_of))
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, [5])
    assert await using == Chunk((5,), "")
    assert (await worker.cancelled.get()).request_id == submit.request_id
    await wait_idle(gateway)


async def test_score_returns_one_array(house):
    _, gateway, _ = await house.simple()
    logits = await use(gateway, lambda client: client.score(ScoreParams([3, 4, 5])))
    assert (logits.shape, logits.dtype) == ((3, 64), "float32")
    assert logits[:, 0].tolist() == [3, 4, 5]


async def test_topology_is_the_view_of_the_server(house):
    _, gateway, _ = await house.simple()
    assert await use(gateway, lambda client: client.topology()) == VIEW


async def test_refusal_raises_the_class_of_the_server(house):
    _, gateway, _ = await house.simple()
    with pytest.raises(errors.InvalidRequestError, match="max_tokens is 0"):
        await use(gateway, lambda client: list(client.generate(GenerateParams([1], max_tokens=0))))


async def test_deadline_raises_its_class(house):
    _, gateway, _ = await house.simple(is_manual=True)
    params = GenerateParams([1])
    with pytest.raises(errors.DeadlineError):
        await use(gateway, lambda client: list(client.generate(params, timeout_s=0.1)))


async def test_unary_error_raises_its_class(house):
    worker = await house.worker()
    source = FixedTopology(errors.StateStoreError("redis is gone"))
    gateway = await house.gateway(worker, topology=source)
    with pytest.raises(errors.StateStoreError, match="redis is gone"):
        await use(gateway, lambda client: client.topology())


async def test_server_that_is_gone_is_a_transport_error(house):
    _, gateway, _ = await house.simple()
    await gateway.stop()
    with pytest.raises(errors.TransportError):
        await use(gateway, lambda client: client.topology())


async def test_ready_server_is_not_waited_for(house):
    _, gateway, _ = await house.simple()
    await use(gateway, lambda client: client.wait_ready(10))


async def test_waiting_for_a_server_that_refuses_ends_with_what_it_said(house):
    _, gateway, _ = await house.simple()
    await gateway.drain()
    with pytest.raises(errors.TransportTimeoutError, match="NOT_SERVING"):
        await use(gateway, lambda client: client.wait_ready(0.2))


async def test_waiting_for_nobody_ends_with_the_address(house):
    _, gateway, _ = await house.simple()
    await gateway.stop()
    with pytest.raises(errors.TransportTimeoutError, match=gateway.bound.grpc):
        await use(gateway, lambda client: client.wait_ready(0.2))


async def test_waiting_ends_when_the_server_becomes_ready(house):
    worker, gateway, _ = await house.simple()
    await worker.close()
    waiting = asyncio.create_task(use(gateway, lambda client: client.wait_ready(30)))
    await worker.listen(worker.port)
    await waiting
