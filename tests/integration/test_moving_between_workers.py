"""Real attention workers that drain or are lost while they run streams: the tokens are the same."""

import asyncio

import pytest

from actors.worker_settings import SnapshotSettings
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from configs.numerics import Numerics
from tests.fakes.text_house import text_gateway, text_pool
from tests.fakes.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(170)]

NUM_STREAMS = 8
MAX_TOKENS = 60
KEPT = SnapshotSettings(memory_bytes=64 << 20, interval_tokens=64, min_gain_tokens=16)


def request_of(index):
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[(index * 31 + i) % 256 for i in range(20 + 9 * index)]),
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        sampling=pb.SamplingParams(temperature=1.0, seed=index),
    )


async def read(call, has_begun=None):
    """Token ids of a stream, and its end."""
    token_ids, finished = [], None
    async for response in call:
        token_ids.extend(response.chunk.token_ids)
        if has_begun is not None and len(token_ids) > 3:
            has_begun.set()
        if response.HasField("finished"):
            finished = response.finished
    return token_ids, finished


@pytest.fixture
def rig(house, tmp_path):
    """Two attention workers behind a gateway, and the streams that run on them."""

    async def start(num_attention=2, **settings):
        folder = tmp_path / "checkpoint"
        pool = house.enter(
            text_pool(
                folder,
                num_attention=num_attention,
                numerics=Numerics.INVARIANT,
                snapshots=SnapshotSettings(**{**vars_of(KEPT), **settings}),
            )
        )
        gateway = await text_gateway(house, pool.endpoints, folder, move_timeout_s=30.0)
        return pool, gateway, await house.stub(gateway)

    return start


def vars_of(settings):
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


async def run_all(stub, disturb):
    """Run all streams; call `disturb` when each has some tokens."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
    reading = [
        asyncio.create_task(read(stub.Generate(request_of(index)), begun[index]))
        for index in range(NUM_STREAMS)
    ]
    for event in begun:
        await event.wait()
    await disturb()
    return await asyncio.gather(*reading)


async def nothing():
    """Disturb nobody."""


def is_empty(worker):
    stats = worker.stats()
    return stats.used_blocks + stats.used_slots + stats.running_requests == 0


@pytest.mark.parametrize(
    ("settings", "is_restored"),
    [({}, True), ({"memory_bytes": 0}, False)],
    ids=["peer's memory", "nothing kept"],
)
async def test_draining_a_worker_moves_its_streams_without_changing_a_token(
    rig, settings, is_restored
):
    pool, gateway, stub = await rig(**settings)
    expected = await run_all(stub, nothing)
    leaving, staying = pool.attention

    async def drain():
        leaving.move_out()

    results = await run_all(stub, drain)
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in expected]
    assert {len(tokens) for tokens, _ in results} == {MAX_TOKENS}
    await until(lambda: leaving.is_drained and is_empty(leaving))
    assert gateway.num_running == 0
    assert gateway.metrics.value("latentmesh_requests_moved_total", reason="drain") > 0
    moved = leaving.stats().moved_requests
    assert moved > 0
    # A token of an answer costs a decode step to compute again, so copies pay even here.
    assert (staying.stats().restores > 0) == is_restored
    # Who comes now goes to the other worker.
    tokens, _ = await read(stub.Generate(request_of(0)))
    assert tokens == expected[0][0]


async def test_streams_of_a_lost_worker_go_on_elsewhere_with_the_same_tokens(rig):
    pool, _, stub = await rig(copy_interval_tokens=8)
    expected = await run_all(stub, nothing)
    lost = pool.attention[0]

    async def lose():
        await asyncio.to_thread(lost.stop)

    results = await run_all(stub, lose)
    assert [tokens for tokens, _ in results] == [tokens for tokens, _ in expected]
    await until(lambda: is_empty(pool.attention[1]))


async def test_a_shared_folder_takes_the_copies_where_there_is_one(rig, tmp_path):
    kept = tmp_path / "kept"
    pool, _, stub = await rig(copy_interval_tokens=8, folder=kept)
    results = await run_all(stub, nothing)
    assert {len(tokens) for tokens, _ in results} == {MAX_TOKENS}
    await until(lambda: any(kept.glob("*")))
    await until(lambda: all(is_empty(worker) for worker in pool.attention))


async def test_prompts_that_begin_alike_go_where_their_prefix_is(rig):
    pool, _, stub = await rig()
    prompt = [(7 * i) % 256 for i in range(200)]
    for turn in range(4):
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[*prompt, turn]), max_tokens=4, ignore_eos=True
        )
        _, finished = await read(stub.Generate(request))
        expected = 201 if turn == 0 else 201 - 192
        assert finished.usage.computed_tokens == expected
    assert sum(worker.stats().prefix_hits for worker in pool.attention) == 3
