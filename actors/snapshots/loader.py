"""Fetches copies of requests for their new worker, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import SnapshotPlace
from actors.snapshots.client import OpenCall, drop_snapshot, get_snapshot
from actors.snapshots.codec import SnapshotBytes, decode_snapshot
from actors.snapshots.folder import FolderVault
from actors.snapshots.memory import MemoryVault
from actors.snapshots.sender import FOLDER_SCHEME
from configs.errors import ServingError, SnapshotError

logger = logging.getLogger(__name__)
Loaded = RequestSnapshot | ServingError
DROP_TIMEOUT_S = 1.0


class SnapshotLoader:
    """`try_load` and `close` from any thread."""

    def __init__(
        self,
        name: str,
        *,
        own: MemoryVault | None,
        own_address: str | None,
        timeout_s: float,
        max_pending: int,
        max_bytes: int,
    ) -> None:
        """Prepare the thread; it starts with the first copy.

        Args:
            name: Of the thread.
            own: The vault of this process, if it has one.
            own_address: Its address.
            timeout_s: For one copy.
            max_pending: Copies that wait; further ones are not fetched.
            max_bytes: Of one copy.
        """
        self._own = own
        self._own_address = own_address
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_pending = 0
        self._is_closed = False
        self._call = OpenCall()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{name}-loader")

    def try_load(self, place: SnapshotPlace, done: Callable[[Loaded], None]) -> bool:
        """Fetch a copy, or return False when too many wait or it is closed. Never blocks.

        `done` is called once for each copy taken, from another thread. A copy that was fetched is
        removed from where it was, after that and where that is possible.
        """
        with self._lock:
            if self._is_closed or self._num_pending >= self._max_pending:
                return False
            self._num_pending += 1
            self._executor.submit(self._run, place, done)
        return True

    def close(self) -> None:
        """Give up what waits and what is on its way; every `done` is called. Idempotent.

        Returns when the thread has ended, at the latest with the transfer's time.
        """
        with self._lock:
            self._is_closed = True
        self._call.end()
        self._executor.shutdown(wait=True)

    def _run(self, place: SnapshotPlace, done: Callable[[Loaded], None]) -> None:
        result: Loaded
        try:
            result = self._load(place)
        except ServingError as exc:
            result = exc
        except Exception as exc:
            # The thread's outermost frame: whoever waits must be told.
            logger.exception("a snapshot could not be fetched")
            result = SnapshotError(f"snapshot {place.name} failed: {exc}")
        with self._lock:
            self._num_pending -= 1
        try:
            done(result)
        except Exception:
            # The thread's outermost frame: nobody else would tell of it.
            logger.exception("snapshot %s was fetched and not taken", place.name)
        if isinstance(result, RequestSnapshot):
            # It goes as the oldest one there, if not now.
            with contextlib.suppress(ServingError):
                self._drop(place)

    def _load(self, place: SnapshotPlace) -> RequestSnapshot:
        if self._is_closed:
            raise SnapshotError(f"snapshot {place.name} is not fetched: its worker stops")
        if not 0 < place.num_bytes <= self._max_bytes:
            raise SnapshotError(
                f"snapshot {place.name} has {place.num_bytes:,} bytes; allowed: "
                f"{self._max_bytes:,} (attention_pool.snapshots.max_stored_bytes)"
            )
        data = self._fetch(place)
        if len(data) != place.num_bytes:
            raise SnapshotError(
                f"snapshot {place.name} has {len(data):,} bytes, {place.num_bytes:,} were announced"
            )
        snapshot = decode_snapshot(data)
        if snapshot.position != place.position:
            raise SnapshotError(
                f"snapshot {place.name} holds {snapshot.position} tokens, {place.position} were "
                "announced"
            )
        return snapshot

    def _fetch(self, place: SnapshotPlace) -> SnapshotBytes:
        if self._own is not None and place.address == self._own_address:
            return self._own.load(place.name)
        if place.address.startswith(FOLDER_SCHEME):
            return self._folder(place).load(place.name, num_bytes=place.num_bytes)
        return get_snapshot(
            place.address,
            place.name,
            timeout_s=self._timeout_s,
            max_bytes=place.num_bytes,
            call=self._call,
        )

    def _drop(self, place: SnapshotPlace) -> None:
        if self._own is not None and place.address == self._own_address:
            self._own.drop(place.name)
        elif place.address.startswith(FOLDER_SCHEME):
            self._folder(place).drop(place.name)
        else:
            drop_snapshot(place.address, place.name, timeout_s=DROP_TIMEOUT_S, call=self._call)

    def _folder(self, place: SnapshotPlace) -> FolderVault:
        path = Path(place.address.removeprefix(FOLDER_SCHEME))
        return FolderVault(path, max_bytes=self._max_bytes)
