"""Several answers as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _End:
    """Put by a source that has ended."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def merge(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield what several generators yield, as it comes, until all have ended.

    Each source is at most one item ahead of the reader. The first error ends all; so does closing
    this generator. All sources are closed when it ends.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for only in source:
                yield only
        return
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_drain(source, queue)) for source in sources]
    num_live = len(tasks)
    try:
        while num_live:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_live -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(source: AsyncGenerator[T, None], queue: asyncio.Queue[T | _End]) -> None:
    error = None
    async with aclosing(source):
        try:
            async for item in source:
                await queue.put(item)
        except Exception as exc:  # noqa: BLE001 - raised by the reader
            error = exc
    await queue.put(_End(error))
