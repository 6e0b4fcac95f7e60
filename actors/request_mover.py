"""Takes requests away from their worker: to another one while it drains, or to be safe of its loss.

On the engine thread, but the ends of transfers, which come from the outlet's thread and are posted.
A few transfers are in flight at once, so that the other requests go on meanwhile: the pause of a
request is its own copy, transfer and restore, not that of those before it.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable
from typing import Protocol

from actors.engine.lanes import Clock
from actors.engine.request import RequestKey
from actors.engine.request_snapshot import RequestSnapshot
from actors.engine.step_loop import Engine
from actors.request_channel import SavedSnapshot, SnapshotPlace
from configs.errors import ServingError
from configs.ids import RequestId

logger = logging.getLogger(__name__)
MAX_MOVING = 2
"""Requests that are on their way at once."""

Sent = SnapshotPlace | ServingError


class SnapshotOutlet(Protocol):
    """Sends copies of requests away. `actors/snapshots/sender.py` does."""

    def try_send(self, snapshot: RequestSnapshot, name: str, done: Callable[[Sent], None]) -> bool:
        """Take a copy, or return False; `done` is called once, from any thread, in bounded time."""


class SnapshotInlet(Protocol):
    """Fetches copies of requests. `actors/snapshots/loader.py` does."""

    def try_load(
        self, place: SnapshotPlace, done: Callable[[RequestSnapshot | ServingError], None]
    ) -> bool:
        """Begin to fetch, or return False; `done` is called once, from any thread."""


class RequestMover:
    """Moves the requests of one engine."""

    def __init__(
        self,
        engine: Engine,
        outlet: SnapshotOutlet | None,
        *,
        post: Callable[[Callable[[], None]], None],
        clock: Clock,
        copy_interval_tokens: int,
    ) -> None:
        """Nothing moves yet.

        Args:
            engine: Owned by the thread that calls the methods here.
            outlet: None computes everything again elsewhere.
            post: Runs an action on the engine thread.
            clock: Monotonic seconds.
            copy_interval_tokens: Running requests are copied away whenever they have so many new
                tokens; 0 never.
        """
        self._engine = engine
        self._outlet = outlet
        self._post = post
        self._clock = clock
        self._copy_interval_tokens = copy_interval_tokens
        self._waiting: deque[RequestKey] = deque()
        self._moving: set[RequestKey] = set()
        self._is_copying = False
        self._saved: list[SavedSnapshot] = []

    def take_saved(self) -> list[SavedSnapshot]:
        """Copies that have arrived since the last call."""
        saved, self._saved = self._saved, []
        return saved

    def move_all(self) -> None:
        """Move every live request away that is not on its way; those without memory at once."""
        known = {*self._waiting, *self._moving}
        self._waiting.extend(key for key in self._engine.live_keys() if key not in known)
        self._move_next()

    def copy_next(self) -> None:
        """Copy away the running request with the most new tokens, if it is time. Call each step."""
        if not self._copy_interval_tokens or self._is_copying or self._outlet is None:
            return
        copy = self._engine.copy_next(self._copy_interval_tokens)
        if copy is None:
            return
        key, snapshot = copy

        def _on_sent(result: Sent) -> None:
            self._post(lambda: self._end_copy(key, result))

        self._is_copying = self._outlet.try_send(snapshot, _name_of(key.request_id), _on_sent)

    def _end_copy(self, key: RequestKey, result: Sent) -> None:
        self._is_copying = False
        self._note(key, result)

    def _move_next(self) -> None:
        while self._waiting and len(self._moving) < MAX_MOVING:
            key = self._waiting.popleft()
            if not self._engine.is_live(key):
                continue
            snapshot = self._engine.begin_move(key)
            if snapshot is not None and self._send(key, snapshot):
                self._moving.add(key)
            else:
                self._engine.end_move(key, self._clock())

    def _send(self, key: RequestKey, snapshot: RequestSnapshot) -> bool:
        def _on_sent(result: Sent) -> None:
            self._post(lambda: self._end_move(key, result))

        outlet = self._outlet
        return outlet is not None and outlet.try_send(snapshot, _name_of(key.request_id), _on_sent)

    def _end_move(self, key: RequestKey, result: Sent) -> None:
        self._moving.discard(key)
        if self._engine.is_live(key):
            self._note(key, result)
            self._engine.end_move(key, self._clock())
        self._move_next()

    def _note(self, key: RequestKey, result: Sent) -> None:
        if isinstance(result, SnapshotPlace):
            self._saved.append(SavedSnapshot(key.request_id, key.attempt, result))
        else:
            logger.warning("no copy of request %s: %s", key.request_id, result.message)


def _name_of(request_id: RequestId) -> str:
    """The newest copy of a request replaces the one before."""
    return re.sub(r"[^a-zA-Z0-9._-]", "_", request_id)[:200]
