"""Waits for what happens in another thread or process and has no event to wait for."""

import asyncio
import time

TIMEOUT_S = 30.0


def wait_until(condition, timeout_s=TIMEOUT_S):
    """Block until a condition holds; call it in a thread where a loop must go on."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


async def until(condition, timeout_s=TIMEOUT_S):
    """Wait until a condition holds."""
    await asyncio.to_thread(wait_until, condition, timeout_s)
