"""A house of gateways for the tests of this folder."""

import asyncio
from contextlib import AsyncExitStack

import pytest_asyncio

from tests.fakes.gateway_house import House


@pytest_asyncio.fixture
async def house():
    """Starts gateways and their workers, and closes them."""
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        yield House(stack)
