"""Running requests by the names that their clients gave them, so that a client can abort them.

Names are the client's: they are unique among the running requests of one gateway and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

from configs.errors import InvalidRequestError

MAX_NAME_CHARS: Final = 256

Event = TypeVar("Event")


class AbortableAnswer(Generic[Event]):
    """The events of one answer, which may be cut short from outside. One reader.

    Args:
        answer: Closed by `abort` and `close`, which frees what it holds.
    """

    def __init__(self, answer: AsyncGenerator[Event, None]) -> None:
        self.is_aborted = False
        self._answer = answer
        self._waiting: asyncio.Timeout | None = None
        self._closing: asyncio.Task[None] | None = None

    async def next_event(self) -> Event | None:
        """Wait for the next event; None at the end, and once the answer is aborted."""
        if self.is_aborted:
            return None
        try:
            # A deadline that `abort` sets to now: it ends this wait and nothing else.
            async with asyncio.timeout(None) as self._waiting:
                return await anext(self._answer, None)
        except TimeoutError:
            if not self.is_aborted:
                raise
            return None
        finally:
            self._waiting = None

    def abort(self) -> None:
        """End the answer. The reader learns of it from `next_event`; memory is freed at once."""
        if self.is_aborted:
            return
        self.is_aborted = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())
        else:  # the reader is busy with an event, perhaps with a client that does not read
            self._start_closing()

    async def close(self) -> None:
        """Free what the answer holds. Idempotent."""
        await asyncio.shield(self._start_closing())

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self._answer.aclose(), name="answer close")
        return self._closing


class ClientRequests:
    """The running requests of one service. Belongs to one event loop."""

    def __init__(self) -> None:
        self._running: dict[str, AbortableAnswer[Any]] = {}

    def __len__(self) -> int:
        """Requests that run."""
        return len(self._running)

    @asynccontextmanager
    async def run(
        self, name: str, answer: AsyncGenerator[Event, None]
    ) -> AsyncIterator[AbortableAnswer[Event]]:
        """Keep an answer under its client's name while the block runs, and close it after.

        Raises:
            InvalidRequestError: The name is empty, too long, or that of a running request; the
                answer is not started.
        """
        self._check(name)
        running = AbortableAnswer(answer)
        self._running[name] = running
        try:
            yield running
        finally:
            del self._running[name]
            await running.close()

    def abort(self, names: Iterable[str]) -> int:
        """Abort those of the requests that run and return their number; others are ignored."""
        found = {name: self._running[name] for name in names if name in self._running}
        for running in found.values():
            running.abort()
        return len(found)

    def _check(self, name: str) -> None:
        if not name:
            raise InvalidRequestError(
                "request_id is empty; set one that no other running request of yours has: Abort "
                "finds the request by it"
            )
        if len(name) > MAX_NAME_CHARS:
            raise InvalidRequestError(
                f"request_id has {len(name)} characters; allowed: 1 to {MAX_NAME_CHARS}"
            )
        if name in self._running:
            raise InvalidRequestError(
                f"request_id {name!r} is that of a request that still runs; wait for its end, "
                "abort it, or choose another id"
            )
