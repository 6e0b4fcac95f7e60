"""How a server stops listening without losing connections that it has just accepted."""

from __future__ import annotations

import asyncio

_ACCEPT_PASSES = 3
"""Passes of the loop from the kernel's accept to the server's callback, in asyncio's servers."""


async def stop_listening(server: asyncio.Server) -> None:
    """Close the server; every connection that was accepted has reached its callback by then.

    `Server.close` alone would leave open for ever what is between the kernel's accept and the
    callback: its transport cannot be made any more (an AssertionError in `Server._attach`).
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(_ACCEPT_PASSES):
        await asyncio.sleep(0)
    server.close()
