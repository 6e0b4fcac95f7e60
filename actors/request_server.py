"""The request channel's server: gateways connect here, over TCP or a Unix socket.

Runs its own event loop in its own thread; the engine thread only appends to bounded buffers. A
connection that sends rubbish, stops reading or breaks is closed and its requests are cancelled;
nothing else is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from actors.attention_worker import HOLD_BACKLOG_BYTES, AttentionWorker
from actors.request_channel import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    StepReport,
    decode_length,
    decode_to_worker,
    encode_message,
)
from configs.errors import FrameError, PortInUseError, TransportError
from configs.ids import GatewayId

logger = logging.getLogger(__name__)
MAX_BACKLOG_BYTES = 2 * MAX_MESSAGE_BYTES
"""A connection that leaves more unread is dropped. Scores are held far below this."""
STALL_TIMEOUT_S = 60.0
"""A connection that reads nothing for so long while something waits is dropped, seconds."""
FLUSH_TIMEOUT_S = 2.0
"""On close, gateways get this long to read what is left, seconds."""


class RequestServer:
    """Serves one attention worker. `start` and `close` from any thread, once each."""

    def __init__(
        self,
        worker: AttentionWorker,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        unix_path: Path | None = None,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """Serve `worker` on `unix_path` if given, else on `host:port`; port 0 takes a free one."""
        self._worker = worker
        self._host = host
        self._port = port
        self._unix_path = unix_path
        self._max_backlog_bytes = max_backlog_bytes
        self._stall_timeout_s = stall_timeout_s
        self._numbers = itertools.count(1)
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Listen, and return the address: `tcp:<host>:<port>` or `unix:<path>`.

        Raises:
            PortInUseError: The port or path is taken.
            TransportError: The address cannot be bound.
        """
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)),
            name=f"request-server-{self._worker.worker}",
            daemon=True,
        )
        self._thread.start()
        return started.result()

    def close(self) -> None:
        """Stop listening, flush and close every connection. Idempotent."""
        if self._thread is None:
            return
        if self._loop is not None and self._closing is not None and self._thread.is_alive():
            # RuntimeError: the loop ended in between.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._thread = None

    async def _serve(self, started: Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        try:
            server, address = await self._listen()
        except TransportError as exc:
            started.set_exception(exc)
            return
        except OSError as exc:
            started.set_exception(self._bind_error(exc))
            return
        started.set_result(address)
        try:
            await self._closing.wait()
        finally:
            server.close()
            await self._close_connections()
            if self._unix_path is not None:
                self._unix_path.unlink(missing_ok=True)

    async def _listen(self) -> tuple[asyncio.Server, str]:
        if self._unix_path is not None:
            server = await asyncio.start_unix_server(self._accept, path=self._unix_path)
            return server, f"unix:{self._unix_path}"
        server = await asyncio.start_server(self._accept, self._host, self._port)
        port = server.sockets[0].getsockname()[1]
        return server, f"tcp:{self._host}:{port}"

    def _bind_error(self, exc: OSError) -> TransportError | PortInUseError:
        place = self._unix_path if self._unix_path is not None else f"{self._host}:{self._port}"
        if exc.errno == errno.EADDRINUSE:
            return PortInUseError(f"{place} is taken; use port 0 or another one")
        return TransportError(f"cannot listen on {place}: {exc}")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(
            GatewayId(f"{self._worker.worker}-connection-{next(self._numbers)}"),
            self._worker,
            reader,
            writer,
            max_backlog_bytes=self._max_backlog_bytes,
            stall_timeout_s=self._stall_timeout_s,
        )
        task = asyncio.current_task()
        if task is not None:
            self._connections[task] = connection
            task.add_done_callback(self._connections.pop)
        await connection.serve()

    async def _close_connections(self) -> None:
        tasks = dict(self._connections)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await asyncio.gather(*(connection.flushed() for connection in tasks.values()))
        for connection in tasks.values():
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Connection:
    """One gateway: reads its messages, and is the sink of its reports."""

    def __init__(
        self,
        gateway: GatewayId,
        worker: AttentionWorker,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_backlog_bytes: int,
        stall_timeout_s: float,
    ) -> None:
        self.gateway = gateway
        self._worker = worker
        self._reader = reader
        self._writer = writer
        self._max_backlog_bytes = max_backlog_bytes
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._is_closed = False
        self._has_news = asyncio.Event()
        self._is_flushed = asyncio.Event()
        self._is_flushed.set()
        self._is_closing = asyncio.Event()

    @property
    def backlog_bytes(self) -> int:
        """Bytes taken by `send` that are not in the kernel yet."""
        return self._backlog_bytes

    def send(self, report: StepReport) -> None:
        """Buffer a report; called on the engine thread."""
        try:
            data = encode_message(report)
        except FrameError:
            logger.exception("%s: a report is too large; the connection is closed", self.gateway)
            self._signal(self._writer.transport.abort)
            return
        with self._lock:
            if self._is_closed:
                return
            self._outbox.append(data)
            self._backlog_bytes += len(data)
            is_over = self._backlog_bytes > self._max_backlog_bytes
        if is_over:
            logger.warning(
                "%s: dropped: it left more than %d bytes unread",
                self.gateway,
                self._max_backlog_bytes,
            )
        self._signal(self._writer.transport.abort if is_over else self._note_news)

    async def serve(self) -> None:
        """Run until either side closes; then cancel what the gateway had."""
        self._writer.write(encode_message(self._worker.welcome))
        self._worker.connect(self.gateway, self)
        tasks = [
            asyncio.create_task(self._read_all()),
            asyncio.create_task(self._write_all()),
            asyncio.create_task(self._wait_for_close()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._worker.disconnect(self.gateway)
            with self._lock:
                self._is_closed = True
                self._outbox.clear()
                self._backlog_bytes = 0
            self._is_flushed.set()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            self._log_ends(ends)
            await self._close_writer()

    def close(self) -> None:
        """End the connection; `serve` returns soon after."""
        self._is_closing.set()

    async def _wait_for_close(self) -> None:
        await self._is_closing.wait()

    async def _close_writer(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()
        except OSError:
            logger.debug("%s: broken while it was closed", self.gateway)

    async def flushed(self) -> None:
        """Wait until everything sent so far is in the kernel, or the connection is closed."""
        await asyncio.sleep(0)  # Let signals of the engine thread run first.
        await self._is_flushed.wait()

    async def _read_all(self) -> None:
        while True:
            prefix = await self._reader.readexactly(LENGTH_BYTES)
            body = await self._reader.readexactly(decode_length(prefix))
            self._worker.handle(self.gateway, decode_to_worker(body))

    async def _write_all(self) -> None:
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            while True:
                with self._lock:
                    if not self._outbox:
                        break
                    data = self._outbox.popleft()
                self._writer.write(data)
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._writer.drain()
                self._take_from_backlog(len(data))
            if not self._has_news.is_set():
                self._is_flushed.set()

    def _take_from_backlog(self, num_bytes: int) -> None:
        with self._lock:
            before = self._backlog_bytes
            self._backlog_bytes -= num_bytes
            has_room = before > HOLD_BACKLOG_BYTES >= self._backlog_bytes
        if has_room:
            self._worker.wake()

    def _note_news(self) -> None:
        self._is_flushed.clear()
        self._has_news.set()

    def _signal(self, callback: Callable[[], None]) -> None:
        # RuntimeError: the loop has ended, and the gateway with it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _log_ends(self, ends: list[BaseException | None]) -> None:
        for end in ends:
            if isinstance(end, asyncio.IncompleteReadError | ConnectionError):
                logger.info("%s: the gateway closed the connection", self.gateway)
            elif isinstance(end, FrameError):
                logger.warning("%s: closed: %s", self.gateway, end.message)
            elif isinstance(end, TimeoutError):
                logger.warning(
                    "%s: closed: it read nothing for %s s", self.gateway, self._stall_timeout_s
                )
            elif isinstance(end, Exception):
                logger.error("%s: closed by an unforeseen error", self.gateway, exc_info=end)
