"""One gateway at the request channel's server: its messages in, its reports out.

Belongs to the server's event loop, but `send` and `backlog_bytes`, which the engine thread calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from actors.attention_worker import HOLD_BACKLOG_BYTES, AttentionWorker
from actors.request_channel import (
    LENGTH_BYTES,
    ToGateway,
    decode_length,
    decode_to_worker,
    encode_message,
)
from configs.errors import FrameError
from configs.ids import GatewayId

logger = logging.getLogger(__name__)
FLUSH_TIMEOUT_S = 2.0
"""On close, a gateway gets this long to read what is left, seconds."""


class RequestConnection:
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
        """Take over an accepted connection; `serve` runs it.

        Args:
            gateway: Name for this connection.
            worker: Is told of its messages, and of its end.
            reader: Of the connection.
            writer: Of the connection.
            max_backlog_bytes: It is dropped when more is unread.
            stall_timeout_s: It is dropped when it reads nothing for so long.
        """
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

    def send(self, report: ToGateway) -> None:
        """Buffer a report or news; called on the engine thread."""
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
                await self._drain()
                self._take_from_backlog(len(data))
            if not self._has_news.is_set():
                self._is_flushed.set()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._writer.drain()
        except TimeoutError:
            self._writer.transport.abort()
            raise

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
