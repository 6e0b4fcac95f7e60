"""Gateways over real sockets, against a worker that runs in a thread over a fake decoder."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from actors.attention_worker import AttentionWorker
from actors.engine.request import RequestKey
from actors.request_channel import (
    LENGTH_BYTES,
    Cancel,
    Credit,
    Ended,
    StepReport,
    Welcome,
    encode_message,
)
from actors.request_client import RequestClient
from actors.request_server import RequestServer
from configs.errors import (
    FrameError,
    PeerClosedError,
    PortInUseError,
    TransportError,
    TransportTimeoutError,
)
from configs.ids import WorkerId
from configs.numerics import EndReason
from tests.fakes.engine_rig import VOCAB, EngineRig, key, limits, score, submit
from tests.fakes.fake_decoder import expected_tokens
from tests.fakes.step_reports import step_reports

WAIT_S = 30.0
pytestmark = pytest.mark.asyncio


class Served:
    """A worker with its engine thread; servers are made by the tests."""

    def __init__(self) -> None:
        self.engine_rig = EngineRig(limits(context_tokens=512))
        self.engine_rig.engine._clock = time.monotonic
        self.worker = AttentionWorker(
            worker=WorkerId("attention-0"), engine=self.engine_rig.engine, clock=time.monotonic
        )
        self._thread = threading.Thread(target=self.worker.run)
        self._thread.start()

    async def wait_until_idle(self) -> None:
        """Wait until the engine has no request; the engine thread answers each look."""
        async with asyncio.timeout(WAIT_S):
            while await self._count_live():
                pass

    async def _count_live(self) -> int:
        return await asyncio.wrap_future(self.worker.call(lambda: self.engine_rig.engine.num_live))

    def close(self) -> None:
        self.worker.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()
    made.engine_rig.assert_memory_is_free()


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, served: Served, tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "w.sock" if request.param == "unix" else None
    server = RequestServer(served.worker, unix_path=path)
    yield server.start()
    server.close()
    server.close()
    assert path is None or not path.exists()


@pytest.fixture
def tcp_address(served: Served) -> Iterator[str]:
    server = RequestServer(served.worker)
    yield server.start()
    server.close()


async def collect(client: RequestClient, *wanted: RequestKey) -> dict[RequestKey, Ended]:
    """Read reports until all wanted requests have ended."""
    client_reports.setdefault(client, [])
    ended: dict[RequestKey, Ended] = {}
    async with asyncio.timeout(WAIT_S):
        async for report in step_reports(client):
            client_reports[client].append(report)
            ended.update({RequestKey(e.request_id, e.attempt): e for e in report.ended})
            if set(wanted) <= set(ended):
                break
    return ended


client_reports: dict[RequestClient, list[StepReport]] = {}


def tokens_of(client: RequestClient, wanted: RequestKey) -> list[int]:
    return [
        token
        for report in client_reports[client]
        for news in report.tokens
        if RequestKey(news.request_id, news.attempt) == wanted
        for token in news.token_ids
    ]


async def test_a_gateway_is_welcomed_and_gets_its_tokens(address: str) -> None:
    client = await RequestClient.connect(address)
    assert client.welcome == Welcome(WorkerId("attention-0"), 1, 512, block_tokens=16)
    await client.send(submit("a", [1], 5))
    await client.send(submit("b", [2], 3))
    ended = await collect(client, key("a"), key("b"))
    assert {end.reason for end in ended.values()} == {EndReason.FINISHED}
    assert tokens_of(client, key("a")) == expected_tokens([1], 5, VOCAB)
    assert tokens_of(client, key("b")) == expected_tokens([2], 3, VOCAB)
    await client.close()


async def test_cancel_and_credit_reach_the_engine(address: str) -> None:
    client = await RequestClient.connect(address)
    await client.send(submit("a", [1], 6, credit=0))
    await client.send(submit("b", [2], 6, credit=0))
    await client.send(Credit(key("a").request_id, 0, 6))
    await client.send(Cancel(key("b").request_id, 0))
    ended = await collect(client, key("a"), key("b"))
    assert ended[key("a")].reason is EndReason.FINISHED
    assert ended[key("b")].reason is EndReason.CANCELLED
    await client.close()


async def test_a_score_arrives_row_by_row(address: str) -> None:
    client = await RequestClient.connect(address)
    await client.send(score("s", [3] * 100))
    await collect(client, key("s"))
    rows = [rows for report in client_reports[client] for rows in report.logits]
    assert sum(r.num_rows for r in rows) == 100
    assert sum(len(r.data) for r in rows) == 100 * VOCAB * 4
    await client.close()


async def test_a_gateway_that_vanishes_frees_its_requests(served: Served, address: str) -> None:
    client = await RequestClient.connect(address)
    await client.send(submit("a", [1], 200, credit=1))
    async for report in step_reports(client):
        if report.tokens:
            break
    await client.close()
    await served.wait_until_idle()
    served.engine_rig.assert_memory_is_free()


@pytest.mark.parametrize(
    "rubbish",
    [b"\xff\xff\xff\xff", (3).to_bytes(LENGTH_BYTES, "little") + b"abc", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["huge length", "no message", "http"],
)
async def test_rubbish_closes_its_connection_and_no_other(address: str, rubbish: bytes) -> None:
    good = await RequestClient.connect(address)
    bad = await RequestClient.connect(address)
    bad._writer.write(rubbish)
    with pytest.raises(PeerClosedError):
        await collect(bad, key("never"))
    await bad.close()
    await good.send(submit("a", [1], 2))
    assert (await collect(good, key("a")))[key("a")].reason is EndReason.FINISHED
    await good.close()


async def test_a_half_message_and_a_close_do_no_harm(served: Served, address: str) -> None:
    client = await RequestClient.connect(address)
    client._writer.write(encode_message(submit("a"))[:9])
    await client.close()
    other = await RequestClient.connect(address)
    await other.send(submit("b", [1], 2))
    assert (await collect(other, key("b")))[key("b")].reason is EndReason.FINISHED
    await other.close()


async def hang_up(sock: socket.socket) -> None:
    """Wait until the other side has closed, without reading what it sent before."""
    poll = select.poll()
    poll.register(sock, 0)
    assert await asyncio.to_thread(poll.poll, WAIT_S * 1000)


async def test_a_gateway_that_stops_reading_is_dropped_and_its_requests_end(
    served: Served, tmp_path: Path
) -> None:
    path = tmp_path / "w.sock"
    server = RequestServer(served.worker, unix_path=path, max_backlog_bytes=20_000)
    server.start()
    reading = await RequestClient.connect(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(path))
        deaf.setblocking(False)
        with suppress(ConnectionError):  # It may be dropped before it has sent all.
            for number in range(40):  # Far more logits than the kernel and 20 kB can hold.
                data = encode_message(score(f"s{number}", [1] * 500))
                await asyncio.get_running_loop().sock_sendall(deaf, data)
        await hang_up(deaf)
        await reading.send(submit("a", [1], 2))
        assert (await collect(reading, key("a")))[key("a")].reason is EndReason.FINISHED
    await reading.close()
    server.close()


async def test_a_gateway_that_reads_nothing_for_too_long_is_dropped(
    served: Served, tmp_path: Path
) -> None:
    path = tmp_path / "w.sock"
    server = RequestServer(served.worker, unix_path=path, stall_timeout_s=0.05)
    server.start()
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(str(path))
        with suppress(ConnectionError):
            for number in range(40):
                deaf.sendall(encode_message(score(f"s{number}", [1] * 500)))
        await hang_up(deaf)
    server.close()


async def test_closing_the_server_tells_the_gateway(served: Served) -> None:
    server = RequestServer(served.worker)
    client = await RequestClient.connect(server.start())
    await asyncio.to_thread(server.close)
    with pytest.raises(PeerClosedError):
        await collect(client, key("never"))
    await client.close()
    with pytest.raises(TransportError, match="cannot connect"):
        await RequestClient.connect(client.address)


async def test_the_last_reports_are_flushed_on_close(served: Served) -> None:
    server = RequestServer(served.worker)
    client = await RequestClient.connect(server.start())
    await client.send(submit("a", [1], 200, credit=1))
    async for report in step_reports(client):
        if report.tokens:
            break
    await asyncio.to_thread(served.close)
    await asyncio.to_thread(server.close)
    assert (await collect(client, key("a")))[key("a")].reason is EndReason.FAILED
    await client.close()


async def test_a_port_in_use_is_a_typed_error(served: Served, tcp_address: str) -> None:
    port = int(tcp_address.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is taken"):
        RequestServer(served.worker, port=port).start()


async def test_an_unusable_path_is_a_typed_error(served: Served, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="cannot listen"):
        RequestServer(served.worker, unix_path=tmp_path / "missing" / "w.sock").start()


@pytest.mark.parametrize("bad", ["", "tcp:", "tcp:host", "ftp:host:1", "unix:", "tcp:host:x"])
async def test_a_malformed_address_is_a_typed_error(bad: str) -> None:
    with pytest.raises(TransportError, match="expected tcp:"):
        await RequestClient.connect(bad)


async def test_sending_on_a_closed_connection_is_a_typed_error(tcp_address: str) -> None:
    client = await RequestClient.connect(tcp_address)
    await client.close()
    await client.close()
    with pytest.raises(PeerClosedError):
        await client.send(submit())
    assert [report async for report in step_reports(client)] == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (encode_message(StepReport(1)), FrameError),
        ((3).to_bytes(LENGTH_BYTES, "little") + b"abc", FrameError),
        (b"", PeerClosedError),
        (None, TransportTimeoutError),
    ],
    ids=["no welcome", "rubbish", "closed", "silent"],
)
async def test_a_server_that_is_no_worker_is_a_typed_error(
    answer: bytes | None, error: type[Exception]
) -> None:
    has_given_up = asyncio.Event()

    async def speak(writer: asyncio.StreamWriter) -> None:
        if answer is None:
            await has_given_up.wait()
        else:
            writer.write(answer)

    async with speaking(speak) as address:
        with pytest.raises(error):
            await RequestClient.connect(address, timeout_s=0.1 if answer is None else WAIT_S)
        has_given_up.set()


async def test_a_message_after_the_welcome_must_be_a_report() -> None:
    welcome = encode_message(Welcome(WorkerId("w"), 1, 1))

    async def speak(writer: asyncio.StreamWriter) -> None:
        writer.write(welcome + welcome)

    async with speaking(speak) as address:
        client = await RequestClient.connect(address)
        with pytest.raises(FrameError, match="after its welcome"):
            await collect(client, key("never"))
        await client.close()


@asynccontextmanager
async def speaking(
    speak: Callable[[asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that is no attention worker; takes one connection, and ends with it."""
    has_ended = asyncio.Event()

    async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await speak(writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            has_ended.set()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await has_ended.wait()


async def test_twenty_gateways_at_once_each_get_their_own(tcp_address: str) -> None:
    async def use(number: int) -> bool:
        client = await RequestClient.connect(tcp_address)
        name = f"g{number}"
        await client.send(submit(name, [number], 4))
        await collect(client, key(name))
        is_right = tokens_of(client, key(name)) == expected_tokens([number], 4, VOCAB)
        await client.close()
        return is_right

    assert all(await asyncio.gather(*(use(number) for number in range(20))))
