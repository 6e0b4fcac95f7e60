"""Copies of requests in the memory of a worker that did not make them: oldest out first."""

from __future__ import annotations

import threading
from collections import OrderedDict

from actors.snapshots.codec import SnapshotBytes
from actors.snapshots.names import check_name, missing
from configs.errors import SnapshotError


class MemoryVault:
    """Holds at most `max_bytes`, with what is on its way in. May be used from any thread."""

    def __init__(self, max_bytes: int) -> None:
        """Start empty; with 0 bytes it refuses everything."""
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._data: OrderedDict[str, SnapshotBytes] = OrderedDict()
        self._stored_bytes = 0
        self._reserved_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes stored, without those reserved."""
        with self._lock:
            return self._stored_bytes

    @property
    def num_snapshots(self) -> int:
        """Copies stored."""
        with self._lock:
            return len(self._data)

    def save(self, name: str, data: SnapshotBytes) -> None:
        """Store a copy in place of one of the same name; the oldest ones make room.

        Raises:
            SnapshotError: The name cannot be one, or the vault cannot hold so much.
        """
        check_name(name)
        with self._lock:
            self._forget(name)
            self._make_room(len(data))
            self._data[name] = data
            self._stored_bytes += len(data)

    def reserve(self, num_bytes: int) -> None:
        """Set bytes aside for a copy on its way; the oldest copies make room at once.

        To be followed by one `release` or `save_reserved`.

        Raises:
            SnapshotError: It is larger than the vault, or than what others on their way leave.
        """
        with self._lock:
            self._make_room(num_bytes)
            self._reserved_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give back what was reserved for a copy that did not arrive."""
        with self._lock:
            self._reserved_bytes -= num_bytes

    def save_reserved(self, name: str, data: SnapshotBytes) -> None:
        """Store a copy whose `len(data)` bytes are reserved and whose name has been checked."""
        with self._lock:
            self._forget(name)
            self._reserved_bytes -= len(data)
            self._stored_bytes += len(data)
            self._data[name] = data

    def load(self, name: str) -> SnapshotBytes:
        """Return a copy. Raises `SnapshotError` when it is not there."""
        with self._lock:
            data = self._data.get(name)
        if data is None:
            raise missing(name, "this worker's memory")
        return data

    def drop(self, name: str) -> None:
        """Forget a copy; one that is not there is as good."""
        with self._lock:
            self._forget(name)

    def _make_room(self, num_bytes: int) -> None:
        free = self.max_bytes - self._reserved_bytes
        if num_bytes > free:
            raise SnapshotError(
                f"snapshot of {num_bytes:,} bytes exceeds the {free:,} bytes that a vault of "
                f"{self.max_bytes:,} can free now; use another place, or raise "
                "attention_pool.snapshots.max_stored_bytes"
            )
        while self._stored_bytes + self._reserved_bytes + num_bytes > self.max_bytes:
            self._forget(next(iter(self._data)))

    def _forget(self, name: str) -> None:
        data = self._data.pop(name, None)
        if data is not None:
            self._stored_bytes -= len(data)
