"""What workers say of their prefix caches decides where requests go, and can be made to forget."""

import asyncio
import json

import pytest

from actors.prefix_chain import chain_keys
from actors.request_channel import FlushCache
from cluster.api import cache_flush
from cluster.api.client import LatentmeshClient
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.cli import main
from configs import errors
from tests.fakes.gateway_house import answer_of, ask, error_of, wait_health
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def keys_of(token_ids):
    return list(chain_keys(token_ids, 4))


@pytest.fixture
def workers_of(house):
    """Starts so many workers that answer, and their gateway."""

    async def start(number, **options):
        workers = [await house.worker(f"attention-{i}", **options) for i in range(number)]
        gateway = await house.gateway(*workers)
        return workers, gateway, await house.stub(gateway)

    return start


async def until_known(gateway, worker, number):
    await until(lambda: gateway._router._prefixes.num_keys(worker.name) == number)


async def served(workers, stub, prompt=PROMPT):
    """Name of the worker that answers a prompt."""
    for worker in workers:
        worker.received.clear()
    await answer_of(stub.Generate(ask(*prompt, max_tokens=1)))
    [name] = [worker.name for worker in workers if worker.received]
    return name


async def test_prompt_goes_where_most_of_it_is_cached(workers_of):
    workers, gateway, stub = await workers_of(3)
    assert await served(workers, stub) == "attention-0"
    await workers[1].send_prefixes(1, keys_of(PROMPT)[:1])
    await workers[2].send_prefixes(1, keys_of(PROMPT))
    await until_known(gateway, workers[1], 1)
    await until_known(gateway, workers[2], 2)
    assert await served(workers, stub) == "attention-2"
    assert await served(workers, stub, (1, 2, 3, 4, 60)) == "attention-1"
    assert await served(workers, stub, (60, 2, 3, 4, 5)) == "attention-0"


async def test_prefix_that_was_evicted_or_whose_worker_drains_attracts_nothing(workers_of):
    workers, gateway, stub = await workers_of(2)
    await workers[1].send_prefixes(1, keys_of(PROMPT))
    await until_known(gateway, workers[1], 2)
    await workers[1].send_prefixes(2, removed=keys_of(PROMPT))
    await until_known(gateway, workers[1], 0)
    assert await served(workers, stub) == "attention-0"
    await workers[1].send_prefixes(3, keys_of(PROMPT))
    await until_known(gateway, workers[1], 2)
    await workers[1].drain()
    await until_known(gateway, workers[1], 0)
    assert await served(workers, stub) == "attention-0"


async def test_worker_that_was_lost_is_known_anew(workers_of):
    workers, gateway, stub = await workers_of(2)
    await workers[1].send_prefixes(7, keys_of(PROMPT))
    await until_known(gateway, workers[1], 2)
    workers[1].drop_connections()
    await until_known(gateway, workers[1], 0)
    await until(lambda: gateway._router.num_connected == 2)
    await workers[1].send_prefixes(1, keys_of(PROMPT))
    await until_known(gateway, workers[1], 2)
    assert await served(workers, stub) == "attention-1"


async def test_cached_prefix_does_not_pile_requests_on_its_worker(workers_of):
    workers, gateway, stub = await workers_of(2, is_manual=True)
    await workers[1].send_prefixes(1, keys_of(PROMPT))
    await until_known(gateway, workers[1], 2)
    calls = []
    for _ in range(5):
        calls.append(stub.Generate(ask(*PROMPT)))
        await workers[1].submitted.get()
    calls.append(stub.Generate(ask(*PROMPT)))
    await workers[0].submitted.get()
    for call in calls:
        call.cancel()


async def test_flush_reaches_every_worker_and_sums_up(workers_of):
    workers, gateway, stub = await workers_of(2)
    workers[0].num_snapshots, workers[1].num_snapshots = 3, 4
    assert (await stub.FlushCache(pb.FlushCacheRequest())).num_snapshots == 7
    assert [await worker.flushed.get() for worker in workers] == [FlushCache(1), FlushCache(1)]

    def act():
        with LatentmeshClient(gateway.bound.grpc) as client:
            return client.flush_cache()

    assert await asyncio.to_thread(act) == 7


async def test_flush_reaches_a_worker_that_drains(workers_of):
    workers, gateway, stub = await workers_of(2)
    workers[0].num_snapshots = 3
    await workers[0].drain()
    await until(lambda: gateway._router.num_connected == 1)
    assert (await stub.FlushCache(pb.FlushCacheRequest())).num_snapshots == 3


async def test_flush_without_an_answer_names_the_worker(workers_of, monkeypatch):
    monkeypatch.setattr(cache_flush, "FLUSH_TIMEOUT_S", 0.05)
    workers, _, stub = await workers_of(2)
    workers[0].num_snapshots, workers[1].num_snapshots = 3, None
    error, status = await error_of(stub.FlushCache(pb.FlushCacheRequest()))
    assert (type(error), status.name) == (errors.WorkerError, "UNAVAILABLE")
    assert "attention-1: no answer within 0.05 s" in error.message
    assert "attention-0" not in error.message


async def test_flush_of_a_worker_that_is_lost_ends_at_once(workers_of):
    workers, _, stub = await workers_of(1)
    workers[0].num_snapshots = None
    call = stub.FlushCache(pb.FlushCacheRequest())
    await workers[0].flushed.get()
    workers[0].drop_connections()
    error, _ = await error_of(call)
    assert "attention-0 was lost" in error.message


async def test_flush_without_workers_is_unavailable(house, workers_of):
    workers, gateway, stub = await workers_of(1)
    await workers[0].close()
    await wait_health(house, gateway, "NOT_SERVING")
    assert isinstance((await error_of(stub.FlushCache(pb.FlushCacheRequest())))[0],
                      errors.NoWorkerError)  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
async def test_command_flushes_and_says_what(workers_of, capsys, as_json):
    workers, gateway, _ = await workers_of(1)
    workers[0].num_snapshots = 5
    address = gateway.bound.grpc
    flags = ["--json"] if as_json else []

    def act():
        with pytest.raises(SystemExit) as ended:
            main(["flush-cache", "--server", address, *flags])
        return ended.value.code or 0

    assert await asyncio.to_thread(act) == 0
    out = capsys.readouterr().out
    if as_json:
        assert json.loads(out) == {"server": address, "num_snapshots": 5}
    else:
        assert out == f"{address} forgot 5 cached prefixes\n"
