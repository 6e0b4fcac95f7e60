"""Makes attention workers forget their cached prefixes, and says which did not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.api.worker_connection import WorkerConnection
from configs.errors import WorkerError
from configs.ids import WorkerId

FLUSH_TIMEOUT_S: Final = 5.0
"""Longest wait for a worker's answer."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What became of forgetting all cached prefixes."""

    num_snapshots: int
    """Snapshots that were forgotten."""
    failed: dict[WorkerId, str]
    """Workers that did not say so, and why."""

    def describe_failures(self) -> str:
        """Return one line that names the workers of `failed`."""
        causes = "; ".join(f"{worker}: {cause}" for worker, cause in self.failed.items())
        return f"attention workers did not flush their caches ({causes})"


async def flush_caches(links: Sequence[WorkerConnection]) -> FlushResult:
    """Ask several workers at once, and wait for all of them, `FLUSH_TIMEOUT_S` at most."""
    answers = await asyncio.gather(*(_flush(link) for link in links))
    return FlushResult(
        num_snapshots=sum(answer for answer in answers if isinstance(answer, int)),
        failed={
            link.endpoint.worker: answer
            for link, answer in zip(links, answers, strict=True)
            if isinstance(answer, str)
        },
    )


async def _flush(link: WorkerConnection) -> int | str:
    """Return how many snapshots a worker forgot, or why that is not known."""
    try:
        async with asyncio.timeout(FLUSH_TIMEOUT_S):
            return await link.flush_cache()
    except TimeoutError:
        return f"no answer within {FLUSH_TIMEOUT_S:g} s"
    except WorkerError as exc:
        return exc.message
