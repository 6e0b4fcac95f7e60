import asyncio
import secrets

import pytest

from cluster.api.access.keys import Refusal
from cluster.api.access.leases import Leases
from cluster.api.access.refusals import BURST, Refusals, printable
from cluster.state_store import open_async_client, server_name
from cluster.telemetry import Metrics


@pytest.mark.asyncio
async def test_what_a_killed_gateway_held_runs_out(state_server):
    caller = secrets.token_hex(4)
    client = open_async_client(state_server.url)
    server = server_name(state_server.url)
    killed = Leases(client, server=server, lease_s=0.2, renew_s=60.0)
    other = Leases(client, server=server)
    assert await killed.take(caller, 1) is not None
    assert await other.take(caller, 1) is None
    await asyncio.sleep(0.3)  # The lease is 0.2 s by the server's clock, which nobody tells.
    assert await other.take(caller, 1) is not None
    await other.close()
    await client.aclose()


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
