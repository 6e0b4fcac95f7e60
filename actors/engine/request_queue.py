"""Requests that own no memory, in order of rank.

Requests that could not run even with memory wait aside: those without credit, and those that come
with the one that computes their prompt.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator
from itertools import islice

from actors.engine.request import EngineRequest, Rank, RequestKey


class RequestQueue:
    """Owned by the engine thread."""

    def __init__(self) -> None:
        self._requests: dict[RequestKey, EngineRequest] = {}
        self._order: list[tuple[Rank, RequestKey]] = []
        """Of those that could run; sorted."""

    def __len__(self) -> int:
        """Requests, those that wait aside too."""
        return len(self._requests)

    def __iter__(self) -> Iterator[EngineRequest]:
        """All of them, in order of arrival here."""
        return iter(list(self._requests.values()))

    def get(self, key: RequestKey) -> EngineRequest | None:
        """Return a request, or None."""
        return self._requests.get(key)

    def add(self, request: EngineRequest) -> None:
        """Take a request; its rank says where it stands."""
        self._requests[request.key] = request
        self.refresh(request)

    def remove(self, request: EngineRequest) -> None:
        """Forget a request; nothing happens if it is not here."""
        if self._requests.get(request.key) is request:
            self._leave_order(request)
            del self._requests[request.key]

    def refresh(self, request: EngineRequest) -> None:
        """Look again whether a request could run; call after its credit or its leader changed."""
        if self._requests.get(request.key) is not request:
            return
        self._leave_order(request)
        if not request.is_paused:
            bisect.insort(self._order, (request.rank, request.key))

    def heads(self, num_requests: int, held: Collection[RequestKey] = ()) -> list[EngineRequest]:
        """Return the first requests that could run and are not `held`, by rank."""
        keys = (key for _, key in self._order if key not in held)
        return [self._requests[key] for key in islice(keys, num_requests)]

    def _leave_order(self, request: EngineRequest) -> None:
        entry = (request.rank, request.key)
        index = bisect.bisect_left(self._order, entry)
        if index < len(self._order) and self._order[index] == entry:
            del self._order[index]
