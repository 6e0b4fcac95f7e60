"""How much a caller may do: what limiters promise, and the one that counts in this process.

Two implementations behind one protocol: `LocalLimits` here, obvious and alone, and `SharedLimits`
in Redis, which all gateways share.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.api.access.keys import Refusal

WINDOW_S: Final = 60.0
CONCURRENCY_RETRY_S: Final = 1.0
"""When a running request ends is not known."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of one caller; None is no limit."""

    requests_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether nothing needs counting."""
        return self.requests_per_minute is None and self.max_concurrent_requests is None


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A request that may not run now."""

    reason: Refusal
    """`RATE` or `CONCURRENCY`."""
    limit: int
    retry_after_s: float


class Lease(Protocol):
    """The place of one running request."""

    async def release(self) -> None:
        """Give it back. Idempotent; never raises: what cannot be given back runs out."""


class Limits(Protocol):
    """Counts requests by caller."""

    async def acquire(self, caller: str, allowance: Allowance) -> Lease | Exceeded:
        """Take a place for a request, or say why not; a refused request is not counted.

        Raises:
            StateStoreError: What is counted elsewhere cannot be reached.
        """

    async def close(self) -> None:
        """End what runs in the background. Idempotent."""


class NoLease:
    """The lease of a caller without a limit of requests at once."""

    async def release(self) -> None:
        """Nothing was taken."""


class LocalLimits:
    """Counts in this process. For one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing is counted yet.

        Args:
            clock: Monotonic, seconds.
        """
        self._clock = clock
        self._begun: dict[str, deque[float]] = {}
        self._running: dict[str, int] = {}

    async def acquire(self, caller: str, allowance: Allowance) -> Lease | Exceeded:
        """See `Limits`."""
        at_once = allowance.max_concurrent_requests
        if at_once is not None and self._running.get(caller, 0) >= at_once:
            return Exceeded(Refusal.CONCURRENCY, at_once, CONCURRENCY_RETRY_S)
        if allowance.requests_per_minute is not None:
            exceeded = self._count(caller, allowance.requests_per_minute)
            if exceeded is not None:
                return exceeded
        if at_once is None:
            return NoLease()
        self._running[caller] = self._running.get(caller, 0) + 1
        return _LocalLease(self, caller)

    async def close(self) -> None:
        """See `Limits`."""

    def give_back(self, caller: str) -> None:
        """Count one running request less."""
        left = self._running[caller] - 1
        if left:
            self._running[caller] = left
        else:
            del self._running[caller]

    def _count(self, caller: str, per_minute: int) -> Exceeded | None:
        now = self._clock()
        begun = self._begun.setdefault(caller, deque())
        while begun and begun[0] <= now - WINDOW_S:
            begun.popleft()
        if len(begun) >= per_minute:
            return Exceeded(Refusal.RATE, per_minute, begun[0] + WINDOW_S - now)
        begun.append(now)
        return None


class _LocalLease:
    def __init__(self, limits: LocalLimits, caller: str) -> None:
        self._limits: LocalLimits | None = limits
        self._caller = caller

    async def release(self) -> None:
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.give_back(self._caller)


def whole_seconds(retry_after_s: float) -> int:
    """Return what a `Retry-After` header says: whole seconds, at least one.

    >>> whole_seconds(0.2), whole_seconds(3.0)
    (1, 3)
    """
    return max(1, math.ceil(retry_after_s))
