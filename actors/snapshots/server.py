"""The vault's server: other attention workers bring and fetch copies of requests here.

Runs its own event loop in its own thread, beside the engine. A connection that sends rubbish or
stalls is closed; nothing else is touched. Room for a copy is reserved before its bytes are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from actors.accepted_connections import stop_listening
from actors.snapshots.codec import SnapshotBytes
from actors.snapshots.memory import MemoryVault
from actors.snapshots.names import check_name
from actors.snapshots.wire import (
    LENGTH_BYTES,
    Answer,
    Drop,
    Found,
    Get,
    Put,
    Question,
    Ready,
    Refused,
    Stored,
    pack,
    unpack,
    unpack_length,
)
from configs.errors import FrameError, SnapshotError, TransportError

logger = logging.getLogger(__name__)
STALL_TIMEOUT_S: Final = 10.0
"""A peer that sends or reads nothing for so long is dropped, seconds."""
IDLE_TIMEOUT_S: Final = 60.0
"""A connection without a question is closed after so long, seconds."""
MIN_BYTES_PER_S: Final = 8 << 20
"""A transfer that is slower on the whole is given up: it holds room that others need."""
MAX_CONNECTIONS: Final = 64
"""Further ones are closed at once."""
_PIECE_BYTES: Final = 1 << 20
T = TypeVar("T")


class VaultServer:
    """Serves one vault. `start` and `close` from any thread, once each."""

    def __init__(
        self,
        vault: MemoryVault,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        unix_path: Path | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """Serve on `unix_path` if given, else on `host:port`; port 0 takes a free one."""
        self._vault = vault
        self._host = host
        self._port = port
        self._unix_path = unix_path
        self._stall_timeout_s = stall_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Listen, and return the address: `tcp:<host>:<port>` or `unix:<path>`.

        Raises:
            TransportError: The address cannot be bound.
        """
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="snapshot-vault", daemon=True
        )
        self._thread.start()
        return started.result()

    def close(self) -> None:
        """Stop listening and drop every connection. Idempotent."""
        if self._thread is None:
            return
        if self._loop is not None and self._closing is not None:
            # RuntimeError: the loop has ended already.
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
            place = self._unix_path if self._unix_path is not None else self._host
            started.set_exception(TransportError(f"the vault cannot listen on {place}: {exc}"))
            return
        started.set_result(address)
        try:
            await self._closing.wait()
        finally:
            await stop_listening(server)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._unix_path is not None:
                self._unix_path.unlink(missing_ok=True)

    async def _listen(self) -> tuple[asyncio.Server, str]:
        if self._unix_path is not None:
            server = await asyncio.start_unix_server(
                self._accept, path=self._unix_path, limit=_PIECE_BYTES
            )
            return server, f"unix:{self._unix_path}"
        server = await asyncio.start_server(
            self._accept, self._host, self._port, limit=_PIECE_BYTES
        )
        return server, f"tcp:{self._host}:{server.sockets[0].getsockname()[1]}"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            logger.warning("the snapshot vault has %d connections; one is refused", MAX_CONNECTIONS)
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve_peer(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Here and not in the task, which may be cancelled before it begins.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve_peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._answer(await self._read_question(reader), reader, writer)
        except (asyncio.IncompleteReadError, OSError):  # TimeoutError is an OSError.
            logger.debug("a peer of the snapshot vault has left")
        except FrameError as exc:
            logger.warning("a peer of the snapshot vault is dropped: %s", exc.message)

    async def _read_question(self, reader: asyncio.StreamReader) -> Question:
        prefix = await _within(IDLE_TIMEOUT_S, reader.readexactly(LENGTH_BYTES))
        length = unpack_length(prefix)
        return unpack(await self._in_time(reader.readexactly(length)), Question)  # type: ignore[arg-type]  # a union

    async def _answer(
        self, question: Question, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            match question:
                case Put():
                    await self._take(question, reader, writer)
                case Get():
                    await self._give(self._vault.load(question.name), writer)
                case Drop():
                    self._vault.drop(question.name)
                    await self._send(writer, Stored())
        except SnapshotError as exc:
            await self._send(writer, Refused(exc.message))

    async def _take(
        self, put: Put, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if put.num_bytes < 0:
            raise FrameError(f"a snapshot of {put.num_bytes} bytes is offered")
        check_name(put.name)
        self._vault.reserve(put.num_bytes)
        try:
            data = bytearray(put.num_bytes)
            await self._send(writer, Ready())
            await _within(self._transfer_s(put.num_bytes), self._receive(data, reader))
        except BaseException:  # Also when cancelled: the room must not stay reserved.
            self._vault.release(put.num_bytes)
            raise
        self._vault.save_reserved(put.name, data)
        await self._send(writer, Stored())

    async def _receive(self, data: bytearray, reader: asyncio.StreamReader) -> None:
        view = memoryview(data)
        while view:
            piece = await self._in_time(reader.read(min(_PIECE_BYTES, len(view))))
            if not piece:
                raise asyncio.IncompleteReadError(b"", len(view))
            view[: len(piece)] = piece
            view = view[len(piece) :]

    async def _give(self, data: SnapshotBytes, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._transfer_s(len(data))):
            await self._send(writer, Found(len(data)))
            view = memoryview(data)
            for start in range(0, len(view), _PIECE_BYTES):
                writer.write(view[start : start + _PIECE_BYTES])
                await self._in_time(writer.drain())

    def _transfer_s(self, num_bytes: int) -> float:
        return self._stall_timeout_s + num_bytes / MIN_BYTES_PER_S

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        writer.write(pack(answer))
        await self._in_time(writer.drain())

    async def _in_time(self, action: Awaitable[T]) -> T:
        return await _within(self._stall_timeout_s, action)


async def _within(timeout_s: float, action: Awaitable[T]) -> T:
    async with asyncio.timeout(timeout_s):
        return await action
