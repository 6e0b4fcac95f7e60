"""Reports of steps among everything that a worker tells a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

from actors.request_channel import StepReport
from actors.request_client import RequestClient


async def step_reports(client: RequestClient) -> AsyncIterator[StepReport]:
    async for news in client:
        if isinstance(news, StepReport):
            yield news
