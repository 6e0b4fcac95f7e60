import asyncio
from contextlib import aclosing

import pytest

from cluster.api.merging import merge
from configs.errors import WorkerError

pytestmark = pytest.mark.asyncio


class Source:
    """Counts up to an end, an error, or for ever."""

    def __init__(self, name, num_items=10**6, error=None):
        self.name = name
        self.num_items = num_items
        self.error = error
        self.num_made = 0
        self.is_closed = False

    async def items(self):
        try:
            for index in range(self.num_items):
                self.num_made += 1
                yield self.name, index
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


async def test_all_items_come_and_those_of_one_source_in_order():
    sources = [Source("a", 3), Source("b", 5), Source("c", 0)]
    items = [item async for item in merge([source.items() for source in sources])]
    for source in sources:
        own = [index for name, index in items if name == source.name]
        assert own == list(range(source.num_items))


async def test_no_source_starves():
    async with aclosing(merge([Source(name).items() for name in "abc"])) as merged:
        names = [(await anext(merged))[0] for _ in range(60)]
    assert min(names.count(name) for name in "abc") >= 15


async def test_reader_that_waits_pauses_every_source():
    sources = [Source("a"), Source("b")]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        await anext(merged)
        for _ in range(100):
            await asyncio.sleep(0)
        assert max(source.num_made for source in sources) <= 3


@pytest.mark.parametrize("num_sources", [1, 3], ids=["one", "several"])
async def test_closing_closes_every_source(num_sources):
    sources = [Source(str(index)) for index in range(num_sources)]
    async with aclosing(merge([source.items() for source in sources])) as merged:
        for _ in range(num_sources + 1):
            await anext(merged)
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_others", [0, 2], ids=["alone", "with others"])
async def test_first_error_is_raised_and_closes_every_source(num_others):
    sources = [Source("bad", 2, WorkerError("gone")), *(Source(str(i)) for i in range(num_others))]
    with pytest.raises(WorkerError, match="gone"):
        async for _ in merge([source.items() for source in sources]):
            pass
    assert all(source.is_closed for source in sources)


async def test_cancelled_reader_closes_every_source():
    sources = [Source("a"), Source("b")]

    async def read():
        async with aclosing(merge([source.items() for source in sources])) as merged:
            async for _ in merged:
                pass

    reading = asyncio.create_task(read())
    for _ in range(20):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert all(source.is_closed for source in sources)
