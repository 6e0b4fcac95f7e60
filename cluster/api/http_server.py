"""uvicorn inside somebody else's event loop: no signals taken, start and stop awaited."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cluster.api.access.http_connection import HttpAccess, HttpConnection
from cluster.api.listening import bind_tcp, format_address

GRACE_S = 1


class HttpServer:
    """One HTTP server. Bound by its constructor, answering after `start`."""

    def __init__(
        self, app: ASGIApp, *, host: str, port: int, access: HttpAccess | None = None
    ) -> None:
        """Bind the port.

        Args:
            app: Answers requests.
            host: Address to bind.
            port: 0 takes any free one.
            access: TLS and bounds of each connection; None serves everybody in the clear.

        Raises:
            PortInUseError: Somebody else listens there.
            ConfigError: The address cannot be bound.
        """
        self._socket = bind_tcp(host, port, setting="api.http_port")
        self.address = format_address(host, self._socket.getsockname()[1])
        self._server = _Server(_config(app, access))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Answer requests."""
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http server")
        ready = asyncio.create_task(self._server.is_ready.wait())
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            ready.cancel()
            await self._task

    async def stop(self) -> None:
        """Close the port and all connections. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self.close()

    def close(self) -> None:
        """Release the port of a server that was not started. Idempotent."""
        self._socket.close()


def _config(app: ASGIApp, access: HttpAccess | None) -> uvicorn.Config:
    more: dict[str, Any] = {}
    if access is not None:
        more = {
            "http": partial(HttpConnection, access=access),
            "timeout_keep_alive": round(access.connections.keep_alive_s),
        }
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        **more,
    )


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none: the process belongs to whoever runs the gateway."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start and say so."""
        await super().startup(sockets=sockets)
        self.is_ready.set()
