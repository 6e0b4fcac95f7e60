"""Limits that all gateways share: counted in Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

import redis.asyncio
from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter

from cluster.api.access.key_table import ACCESS_ROOT
from cluster.api.access.keys import Refusal
from cluster.api.access.leases import Leases
from cluster.api.access.limits import (
    CONCURRENCY_RETRY_S,
    Allowance,
    Exceeded,
    Lease,
    Limits,
    NoLease,
)
from cluster.state_store import redis_errors
from configs.errors import StateStoreError

BREAK_S: Final = 5.0
"""After a failure the shared limits are left alone this long."""

_logger = logging.getLogger(__name__)


class SharedLimits:
    """Requests of the last minute (a moving window) and requests at once (leases), in Redis.

    The window's times are the gateways' clocks; leases go by the server's.
    """

    def __init__(
        self, client: redis.asyncio.Redis, *, server: str, leases: Leases | None = None
    ) -> None:
        """Use a client that the caller closes.

        Args:
            client: Of the database that all gateways share.
            server: Its name, for errors.
            leases: Replaces the usual ones.
        """
        self._server = server
        self._leases = Leases(client, server=server) if leases is None else leases
        storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix=f"{ACCESS_ROOT}rate",
            connection_pool=client.connection_pool,  # type: ignore[arg-type]  # passed on to redis-py
        )
        self._window = MovingWindowRateLimiter(storage)

    async def acquire(self, caller: str, allowance: Allowance) -> Lease | Exceeded:
        """See `Limits`."""
        lease: Lease = NoLease()
        at_once = allowance.max_concurrent_requests
        if at_once is not None:
            taken = await self._leases.take(caller, at_once)
            if taken is None:
                return Exceeded(Refusal.CONCURRENCY, at_once, CONCURRENCY_RETRY_S)
            lease = taken
        if allowance.requests_per_minute is None:
            return lease
        try:
            exceeded = await self._count(caller, allowance.requests_per_minute)
        except BaseException:
            await lease.release()
            raise
        if exceeded is not None:
            await lease.release()
            return exceeded
        return lease

    async def close(self) -> None:
        """See `Limits`."""
        await self._leases.close()

    async def _count(self, caller: str, per_minute: int) -> Exceeded | None:
        limit = RateLimitItemPerMinute(per_minute)
        with redis_errors(self._server, "count a request"):
            if await self._window.hit(limit, caller):
                return None
            window = await self._window.get_window_stats(limit, caller)
        # The oldest request may have left the window meanwhile.
        return Exceeded(Refusal.RATE, per_minute, max(0.0, window.reset_time - time.time()))


class FallbackLimits:
    """Shared limits, and local ones while the state store is away: each gateway then alone.

    For keys in a file, which go on working without the state store.
    """

    def __init__(self, shared: Limits, local: Limits, clock: Callable[[], float]) -> None:
        """Take both; `clock` is monotonic, seconds."""
        self._shared = shared
        self._local = local
        self._clock = clock
        self._broken_until = float("-inf")

    async def acquire(self, caller: str, allowance: Allowance) -> Lease | Exceeded:
        """See `Limits`. Raises nothing."""
        if self._clock() >= self._broken_until:
            try:
                return await self._shared.acquire(caller, allowance)
            except StateStoreError as exc:
                self._broken_until = self._clock() + BREAK_S
                _logger.warning(
                    "limits are counted in this gateway alone for %g s: %s", BREAK_S, exc
                )
        return await self._local.acquire(caller, allowance)

    async def close(self) -> None:
        """See `Limits`."""
        await self._shared.close()
        await self._local.close()
