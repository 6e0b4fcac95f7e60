import asyncio
import secrets

import pytest
import pytest_asyncio

from cluster.api.access.keys import Refusal
from cluster.api.access.leases import Leases
from cluster.api.access.refusals import BURST, Refusals, printable
from cluster.state_store import open_async_client, server_name
from cluster.telemetry import Metrics


@pytest_asyncio.fixture
async def make(state_server):
    """Makes the leases of a gateway; its own client each."""
    clients = []

    def make_one(**changes):
        client = open_async_client(state_server.url)
        clients.append(client)
        return Leases(client, server=server_name(state_server.url), **changes)

    yield make_one
    for client in clients:
        await client.aclose()


def new_caller():
    return secrets.token_hex(4)


async def take_soon(leases, caller):
    """Take a place once there is one; within ten seconds."""
    for _ in range(200):
        lease = await leases.take(caller, 1)
        if lease is not None:
            return lease
        await asyncio.sleep(0.05)  # Leases run out by the server's clock, which has no event.
    raise AssertionError("no place came free")


@pytest.mark.asyncio
async def test_what_a_killed_gateway_held_runs_out(make):
    caller = new_caller()
    killed, other = make(lease_s=2.0, renew_s=60.0), make()
    assert await killed.take(caller, 1) is not None
    assert await other.take(caller, 1) is None
    await take_soon(other, caller)
    await other.close()


@pytest.mark.asyncio
async def test_a_lease_that_is_renewed_does_not_run_out(make):
    caller = new_caller()
    holder, other = make(lease_s=2.0, renew_s=60.0), make()
    assert await holder.take(caller, 1) is not None
    for _ in range(5):
        await asyncio.sleep(0.5)
        await holder.renew()
    assert await other.take(caller, 1) is None


@pytest.mark.asyncio
async def test_a_lease_that_is_given_back_is_free_at_once(make):
    caller = new_caller()
    holder, other = make(), make()
    lease = await holder.take(caller, 1)
    await lease.release()
    await lease.release()
    assert (holder.num_held, await other.take(caller, 1) is None) == (0, False)
    await holder.close()
    await other.close()


@pytest.mark.asyncio
async def test_a_renewal_does_not_bring_back_what_was_given_back(make):
    caller = new_caller()
    holder, other = make(), make()
    lease = await holder.take(caller, 1)
    await asyncio.gather(holder.renew(), lease.release())
    await holder.close()
    assert await other.take(caller, 1) is not None
    await other.close()


def test_refusals_are_one_line_each_and_not_too_many(caplog):
    metrics = Metrics()
    refusals = Refusals(metrics, lambda: 0.0)
    for _ in range(BURST + 20):
        refusals.note("grpc", Refusal.NO_KEY, "from\n1.2.3.4", "x" * 999)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == BURST
    assert all("\n" not in line and len(line) < 500 for line in lines)
    counted = metrics.value("latentmesh_access_refused_total", door="grpc", reason="no_key")
    assert counted == BURST + 20


def test_what_cannot_be_printed_is_not():
    assert printable("a\x1b[31m\n") == "a?[31m?"
