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
import threading
from concurrent.futures import Future
from pathlib import Path

from actors.accepted_connections import stop_listening
from actors.attention_worker import AttentionWorker
from actors.request_channel import MAX_MESSAGE_BYTES
from actors.request_connection import FLUSH_TIMEOUT_S, RequestConnection
from configs.errors import PortInUseError, TransportError
from configs.ids import GatewayId

MAX_BACKLOG_BYTES = 2 * MAX_MESSAGE_BYTES
"""A connection that leaves more unread is dropped. Scores are held far below this."""
STALL_TIMEOUT_S = 60.0
"""A connection that reads nothing for so long while something waits is dropped, seconds."""


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
        self._connections: dict[asyncio.Task[None], RequestConnection] = {}
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
        except OSError as exc:
            started.set_exception(self._bind_error(exc))
            return
        started.set_result(address)
        try:
            await self._closing.wait()
        finally:
            await stop_listening(server)
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

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = RequestConnection(
            GatewayId(f"{self._worker.worker}-connection-{next(self._numbers)}"),
            self._worker,
            reader,
            writer,
            max_backlog_bytes=self._max_backlog_bytes,
            stall_timeout_s=self._stall_timeout_s,
        )
        task = asyncio.create_task(connection.serve())
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)
        # Here too: the task may be cancelled before it begins.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _close_connections(self) -> None:
        tasks = dict(self._connections)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await asyncio.gather(*(connection.flushed() for connection in tasks.values()))
        for connection in tasks.values():
            connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)
