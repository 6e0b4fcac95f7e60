"""Slow, talkative and refused clients of a gateway's connections, byte by byte."""

import asyncio
import struct
from datetime import UTC, datetime

import pytest

from cluster.api.access.key_file import KeyFile
from cluster.api.access.keys import make_key
from cluster.api.gateway_settings import AccessSettings, ConnectionSettings
from configs.metrics import REFUSED_ACCESS

pytestmark = pytest.mark.asyncio

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NUM_PINGS = 300


def frame(kind, payload=b"", flags=0):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload


async def read_frame(reader):
    head = await reader.readexactly(9)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


@pytest.fixture
def connect(house):
    """Opens plain connections to a door and closes them."""

    async def open_one(address):
        host, port = address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        house.close_later(writer.wait_closed)

        async def close():
            writer.close()

        house.close_later(close)
        return reader, writer

    return open_one


@pytest.fixture
def refused(house):
    """Starts a gateway with short patience that asks for keys."""

    async def start(tmp_path, **connections):
        path = tmp_path / "keys.json"
        _, record = make_key("alice", now=datetime.now(UTC))
        await KeyFile(path).put(record)
        return await house.gateway(
            await house.worker(),
            access=AccessSettings(needs_key=True, key_file=path),
            connections=ConnectionSettings(**connections),
        )

    return start


def count(gateway, reason):
    return gateway.metrics.value(REFUSED_ACCESS.name, door="http", reason=reason)


async def test_pings_without_calls_are_answered_and_end_nothing(house, connect):
    gateway = await house.gateway(await house.worker())
    reader, writer = await connect(gateway.bound.grpc)
    writer.write(PREFACE + frame(SETTINGS))
    async with asyncio.timeout(20):
        for number in range(NUM_PINGS):
            writer.write(frame(PING, struct.pack(">Q", number)))
            while (got := await read_frame(reader))[:2] != (PING, ACK):
                assert got[0] != GOAWAY, got[2]
            assert struct.unpack(">Q", got[2]) == (number,)


async def test_an_idle_old_connection_is_asked_to_leave(house, connect):
    gateway = await house.gateway(
        await house.worker(), connections=ConnectionSettings(max_age_s=0.2, age_grace_s=0.2)
    )
    reader, writer = await connect(gateway.bound.grpc)
    writer.write(PREFACE + frame(SETTINGS))
    async with asyncio.timeout(20):
        while (got := await read_frame(reader))[0] != GOAWAY:
            pass
    _, error = struct.unpack(">II", got[2][:8])
    assert error == 0


async def test_a_refused_client_that_still_writes_reads_its_answer(refused, connect, tmp_path):
    gateway = await refused(tmp_path)
    reader, writer = await connect(gateway.bound.http)
    size = 1 << 20
    writer.write(POST + f"Content-Length: {size}\r\n\r\n".encode())
    async with asyncio.timeout(20):
        assert (await reader.readline()).split()[1] == b"401"
        # The answer is there before the body is.
        writer.write(b" " * size + b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in await reader.read()
    assert count(gateway, "no_key") == 1
    assert count(gateway, "large_head") == 0


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        pytest.param(b"", "slow_client", id="nothing"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost:", "slow_client", id="half a head"),
        pytest.param(b"\r\n", "slow_client", id="an empty line"),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"x" * 5000, "large_head", id="a large head"),
    ],
)
async def test_a_slow_or_endless_client_is_cut_off(refused, connect, tmp_path, sent, reason):
    gateway = await refused(tmp_path, receive_timeout_s=0.2, max_header_bytes=4096)
    reader, writer = await connect(gateway.bound.http)
    writer.write(sent)
    async with asyncio.timeout(20):
        assert await reader.read() == b""
    assert count(gateway, reason) == 1


async def test_who_drips_the_body_of_a_refused_request_is_cut_off(refused, connect, tmp_path):
    gateway = await refused(tmp_path, receive_timeout_s=0.2)
    reader, writer = await connect(gateway.bound.http)
    async with asyncio.timeout(20):
        writer.write(POST + b"Content-Length: 9\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.write(b"{")
        await reader.read()
    assert count(gateway, "slow_client") == 1


async def test_a_patient_client_may_rest_between_requests(refused, connect, tmp_path):
    gateway = await refused(tmp_path, receive_timeout_s=0.1, keep_alive_s=1.0)
    reader, writer = await connect(gateway.bound.http)
    async with asyncio.timeout(20):
        writer.write(POST + b"Content-Length: 2\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.write(b"{}")
        await reader.read()
    assert count(gateway, "slow_client") == 0
