"""Which live request's deadline comes next, without looking at all of them."""

from __future__ import annotations

import heapq

from actors.engine.request import EngineRequest

_MIN_SWEEP = 64
"""Requests among which those that have ended are let be."""


class DeadlineHeap:
    """Owned by the engine thread. Of requests that have ended it keeps as many as of live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, EngineRequest]] = []
        self._sweep_at = _MIN_SWEEP

    def __len__(self) -> int:
        """Requests that it keeps, some that have ended among them."""
        return len(self._heap)

    def add(self, request: EngineRequest) -> None:
        """Watch a request; nothing happens if it has no deadline."""
        if request.deadline is None:
            return
        if len(self._heap) >= self._sweep_at:
            # Far deadlines would keep what has long ended.
            self._heap = [entry for entry in self._heap if not entry[2].is_ended]
            heapq.heapify(self._heap)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))
        heapq.heappush(self._heap, (request.deadline, request.number, request))

    def first(self) -> float | None:
        """Return the earliest deadline of a request that has not ended."""
        while self._heap and self._heap[0][2].is_ended:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_passed(self, now: float) -> list[EngineRequest]:
        """Return the requests that have not ended and whose deadline is not after `now`."""
        passed: list[EngineRequest] = []
        deadline = self.first()
        while deadline is not None and deadline <= now:
            passed.append(heapq.heappop(self._heap)[2])
            deadline = self.first()
        return passed
