"""The gateway's side of the request channel: one connection to one attention worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from actors.request_channel import (
    LENGTH_BYTES,
    CacheFlushed,
    Draining,
    PrefixNews,
    StepReport,
    ToGateway,
    ToWorker,
    Welcome,
    WorkerLevels,
    decode_length,
    decode_to_gateway,
    encode_message,
)
from configs.errors import (
    FrameError,
    PeerClosedError,
    TransportError,
    TransportTimeoutError,
)

CONNECT_TIMEOUT_S = 10.0

WorkerNews = StepReport | PrefixNews | Draining | CacheFlushed | WorkerLevels
"""What a worker sends after its welcome."""


class RequestClient:
    """An open connection. Belongs to one event loop; `send` from one task at a time."""

    def __init__(
        self,
        address: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcome: Welcome,
    ) -> None:
        """Take over an open connection; use `connect`."""
        self.address = address
        self.welcome = welcome
        self._reader = reader
        self._writer = writer
        self._is_closed = False

    @classmethod
    async def connect(cls, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> RequestClient:
        """Connect and read the worker's `Welcome`.

        Args:
            address: `tcp:<host>:<port>` or `unix:<path>`, as `RequestServer.start` returned it.
            timeout_s: For all of it.

        Raises:
            TransportError: The address is malformed, or nobody listens there.
            TransportTimeoutError: No welcome in time.
            PeerClosedError: The worker closed the connection.
            FrameError: What answers is no attention worker.
        """
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await _open(address)
                welcome = await _read_welcome(reader, address)
        except TimeoutError as exc:
            _abort(writer)
            raise TransportTimeoutError(
                f"no welcome from {address} in {timeout_s} s; is it an attention worker?"
            ) from exc
        except BaseException:
            _abort(writer)
            raise
        return cls(address, reader, writer, welcome)

    async def send(self, message: ToWorker) -> None:
        """Send a message; waits while the worker does not read.

        Raises:
            PeerClosedError: The connection is gone.
            FrameError: The message is too large.
        """
        data = encode_message(message)
        if self._is_closed or self._writer.is_closing():
            raise PeerClosedError(f"the connection to {self.address} is closed")
        self._writer.write(data)
        try:
            await self._writer.drain()
        except OSError as exc:
            raise PeerClosedError(f"{self.address} closed the connection: {exc}") from exc

    async def __aiter__(self) -> AsyncIterator[WorkerNews]:
        """Yield what the worker sends, in order; ends after `close`.

        Raises:
            PeerClosedError: The worker closed the connection.
            FrameError: It sent a second welcome, or what is no message.
        """
        while True:
            try:
                message = await _read_message(self._reader, self.address)
            except PeerClosedError:
                if self._is_closed:
                    return
                raise
            if isinstance(message, Welcome):
                raise FrameError(f"{self.address} sent Welcome after its welcome")
            yield message

    async def close(self) -> None:
        """End the connection; the worker cancels what is left. Idempotent."""
        self._is_closed = True
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    scheme, _, rest = address.partition(":")
    try:
        if scheme == "unix" and rest:
            return await asyncio.open_unix_connection(rest)
        host, _, port = rest.rpartition(":")
        if scheme == "tcp" and host and port.isdigit():
            return await asyncio.open_connection(host, int(port))
    except OSError as exc:
        raise TransportError(f"cannot connect to attention worker at {address}: {exc}") from exc
    raise TransportError(
        f"request-channel address is {address!r}; expected tcp:<host>:<port> or unix:<path>"
    )


async def _read_welcome(reader: asyncio.StreamReader, address: str) -> Welcome:
    message = await _read_message(reader, address)
    if not isinstance(message, Welcome):
        raise FrameError(f"{address} sent {type(message).__name__} first, not Welcome")
    return message


async def _read_message(reader: asyncio.StreamReader, address: str) -> ToGateway:
    try:
        prefix = await reader.readexactly(LENGTH_BYTES)
        return decode_to_gateway(await reader.readexactly(decode_length(prefix)))
    except (asyncio.IncompleteReadError, OSError) as exc:
        raise PeerClosedError(f"{address} closed the connection") from exc


def _abort(writer: asyncio.StreamWriter | None) -> None:
    if writer is not None:
        writer.transport.abort()
