"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from configs.errors import RequestCancelledError

T = TypeVar("T")


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it when the client closes the connection first.

    The body has to be read before.

    Raises:
        RequestCancelledError: The client is gone.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_wait_gone(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestCancelledError("the client closed the connection")
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: parts are sent as they come, and the source ends with the client.

    A client that reads slowly holds the source up: each part waits until the last one is out.
    """

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        """Send `parts`, an asynchronous generator; it is closed in any case."""
        self._parts = parts
        self.background = None
        self.status_code = 200
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or as much as the client wants."""
        sending = asyncio.create_task(self._send_all(send))
        watching = asyncio.create_task(_wait_gone(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            sending.cancel()
            results = await asyncio.gather(sending, return_exceptions=True)
            await asyncio.gather(watching, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._parts) as parts:  # type: ignore[type-var]  # a generator
            await send(start)
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
