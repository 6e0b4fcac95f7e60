"""Which live request's deadline comes next, without looking at all of them."""

from __future__ import annotations

import heapq

from actors.engine.request import EngineRequest


class DeadlineHeap:
    """Owned by the engine thread. Requests that have ended are forgotten when their turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, EngineRequest]] = []

    def add(self, request: EngineRequest) -> None:
        """Watch a request; nothing happens if it has no deadline."""
        if request.deadline is not None:
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
