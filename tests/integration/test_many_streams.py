"""64 streams at once, some of which are cancelled: the others do not notice."""

import asyncio
import random

import grpc
import pytest

from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from configs.numerics import Numerics
from tests.fakes.gateway_house import wait_idle
from tests.fakes.text_house import text_gateway, text_pool
from tests.fakes.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

NUM_STREAMS = 64
MAX_TOKENS = 24
NUM_CANCELLED = NUM_STREAMS // 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text") / "checkpoint"


@pytest.fixture(scope="module")
def pool(folder):
    with text_pool(folder, num_slots=40, numerics=Numerics.INVARIANT) as running:
        yield running


def request_of(index):
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[(index * 31 + i) % 256 for i in range(1 + index)]),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        sampling=pb.SamplingParams(temperature=1.0, seed=index),
    )


async def read(call, *, leave_after=None):
    """Token ids of a stream; leaves in the middle when told to."""
    token_ids = []
    try:
        async for response in call:
            token_ids.extend(response.chunk.token_ids)
            if leave_after is not None and len(token_ids) >= leave_after:
                call.cancel()
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        if leave_after is None:
            raise
    return token_ids


async def test_streams_are_exact_whatever_happens_to_others(house, pool, folder):
    gateway = await text_gateway(house, pool.endpoints, folder)
    stub = await house.stub(gateway)
    draw = random.Random(5)
    cancelled = set(draw.sample(range(NUM_STREAMS), NUM_CANCELLED))

    async def run(leaving):
        calls = [stub.Generate(request_of(index)) for index in range(NUM_STREAMS)]
        return await asyncio.gather(
            *(
                read(call, leave_after=draw.randint(0, 12) if index in leaving else None)
                for index, call in enumerate(calls)
            )
        )

    undisturbed = await run(set())
    disturbed = await run(cancelled)
    assert {len(tokens) for tokens in undisturbed} == {MAX_TOKENS}
    for index in set(range(NUM_STREAMS)) - cancelled:
        assert disturbed[index] == undisturbed[index]
    await wait_idle(gateway)
    assert gateway.num_running == 0
    # A worker hears of the last cancellation a step later.
    await until(lambda: pool.is_idle)
