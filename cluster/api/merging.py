"""Several answers as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

T = TypeVar("T")


class _Turn(Generic[T]):
    """One source: what it has put into the queue, and its right to put the next."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self.source = source
        self.may_go_on = asyncio.Semaphore(1)


class _End:
    """Put by a source that has ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what several generators yield, as it comes, until all have ended.

    Sources take turns: each is at most one item ahead of the reader, and none waits for more than
    one item of each other. The first error ends all; so does closing this generator. All sources
    are closed when it ends.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for only in source:
                yield only
        return
    # Bounded by the turns. A queue with a limit would let one source overtake those that wait.
    queue: asyncio.Queue[tuple[_Turn[T], T | _End]] = asyncio.Queue()
    tasks = [asyncio.create_task(_drain(_Turn(source), queue)) for source in sources]
    num_live = len(tasks)
    try:
        while num_live:
            turn, item = await queue.get()
            if not isinstance(item, _End):
                turn.may_go_on.release()
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_live -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task that is cancelled before it began closes nothing.
        for source in sources:
            await source.aclose()


async def _drain(turn: _Turn[T], queue: asyncio.Queue[tuple[_Turn[T], T | _End]]) -> None:
    end = _End()
    async with aclosing(turn.source) as source:
        try:
            await turn.may_go_on.acquire()
            async for item in source:
                queue.put_nowait((turn, item))
                await turn.may_go_on.acquire()
        except Exception as exc:  # noqa: BLE001 - raised by the reader
            end = _End(exc)
    queue.put_nowait((turn, end))
