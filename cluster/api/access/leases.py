"""Places of running requests in Redis, shared by all gateways.

One sorted set per caller: a member is a lease, its score the moment it runs out by the server's
clock. A gateway renews what it holds; what a killed gateway held runs out within `LEASE_S`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, Final

import redis.asyncio

from cluster.api.access.key_table import ACCESS_ROOT
from cluster.state_store import redis_errors
from configs.errors import StateStoreError

LEASE_S: Final = 30.0
RENEW_S: Final = 10.0

# KEYS[1] the set; ARGV: lease, limit, milliseconds a lease lasts. Returns 1 when it was taken.
_TAKE: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
# KEYS[1] the set; ARGV: lease, milliseconds. A lease that ran out is taken again: its request runs.
_RENEW: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

_logger = logging.getLogger(__name__)


class Leases:
    """The leases that one gateway holds. Belongs to one event loop."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        server: str,
        lease_s: float = LEASE_S,
        renew_s: float = RENEW_S,
    ) -> None:
        """Nothing is held yet.

        Args:
            client: Closed by the caller.
            server: Name of the server, for errors.
            lease_s: How long a lease lasts that nobody renews.
            renew_s: Time between two renewals, well below `lease_s`.
        """
        self._client = client
        self._server = server
        self._lease_ms = round(lease_s * 1000)
        self._renew_s = renew_s
        self._take = client.register_script(_TAKE)
        self._renew = client.register_script(_RENEW)
        self._owner = secrets.token_hex(6)
        self._last = 0
        self._held: dict[str, str] = {}
        self._renewing: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def num_held(self) -> int:
        """Leases of this gateway."""
        return len(self._held)

    async def take(self, caller: str, limit: int) -> HeldLease | None:
        """Take a lease, or return None when `limit` of the caller are taken.

        Raises:
            StateStoreError: The server does not answer.
        """
        self._last += 1
        lease = f"{self._owner}-{self._last}"
        taking = asyncio.ensure_future(self._try_take(caller, lease, limit))
        try:
            is_taken = await asyncio.shield(taking)
        except asyncio.CancelledError:
            # Whether the server took it is not known here, so it is given back.
            self._give_back_later(caller, lease, after=taking)
            raise
        if not is_taken:
            return None
        self._held[lease] = caller
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_forever(), name="renew leases")
        return HeldLease(self, caller, lease)

    async def give_back(self, caller: str, lease: str) -> None:
        """Give a lease back, also when the caller is cancelled meanwhile. Never raises otherwise.

        What cannot be given back runs out.
        """
        self._held.pop(lease, None)
        await asyncio.shield(self._give_back_later(caller, lease))

    async def renew(self) -> None:
        """Renew every lease once.

        Raises:
            StateStoreError: The server does not answer.
        """
        held = list(self._held.items())
        with redis_errors(self._server, "renew leases"):
            async with self._client.pipeline(transaction=False) as pipe:
                for lease, caller in held:
                    await self._renew(
                        keys=[_key(caller)], args=[lease, self._lease_ms], client=pipe
                    )
                await pipe.execute()
        # One that was given back while its renewal was on the way is back in the set.
        for lease, caller in held:
            if lease not in self._held:
                self._give_back_later(caller, lease)

    async def close(self) -> None:
        """Stop renewing and wait for what is being given back. Idempotent."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        await asyncio.gather(*self._releases)

    async def _try_take(self, caller: str, lease: str, limit: int) -> bool:
        with redis_errors(self._server, "count a running request"):
            taken: Any = await self._take(keys=[_key(caller)], args=[lease, limit, self._lease_ms])
        return bool(taken)

    def _give_back_later(
        self, caller: str, lease: str, *, after: asyncio.Future[bool] | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(self._remove(caller, lease, after), name="give back a lease")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        return task

    async def _remove(self, caller: str, lease: str, after: asyncio.Future[bool] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
            if not after.cancelled() and after.exception() is not None:
                return
        try:
            with redis_errors(self._server, "give back a lease"):
                await self._client.zrem(_key(caller), lease)
        except StateStoreError as exc:
            _logger.warning("a lease of %s runs out by itself: %s", caller, exc)

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            if not self._held:
                continue
            try:
                await self.renew()
            except StateStoreError as exc:
                _logger.warning("%d leases were not renewed: %s", len(self._held), exc)


class HeldLease:
    """A lease of a running request; see `Lease`."""

    def __init__(self, leases: Leases, caller: str, lease: str) -> None:
        self._leases: Leases | None = leases
        self._caller = caller
        self._lease = lease

    async def release(self) -> None:
        """See `Lease`."""
        leases, self._leases = self._leases, None
        if leases is not None:
            await leases.give_back(self._caller, self._lease)


def _key(caller: str) -> str:
    return f"{ACCESS_ROOT}leases:{caller}"
