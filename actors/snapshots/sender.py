"""Sends copies of requests away from their worker, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import SnapshotPlace
from actors.snapshots.client import OpenCall, put_snapshot
from actors.snapshots.codec import encode_snapshot
from actors.snapshots.folder import FolderVault
from configs.errors import ServingError, SnapshotError, WorkerError
from configs.ids import WorkerId

logger = logging.getLogger(__name__)
FOLDER_SCHEME = "folder:"
Done = Callable[[SnapshotPlace | ServingError], None]


@dataclass(frozen=True, slots=True)
class Destination:
    """A place for copies."""

    address: str
    """`folder:<path>`, `unix:<path>` or `tcp:<host>:<port>`."""
    worker: WorkerId
    """Whose vault it is; "" for a folder."""


@dataclass(frozen=True, slots=True)
class _Order:
    snapshot: RequestSnapshot
    name: str
    done: Done


class SnapshotSender:
    """`try_send` and `close` from any thread."""

    def __init__(
        self,
        name: str,
        *,
        destinations: Callable[[], Sequence[Destination]],
        timeout_s: float,
        max_pending_bytes: int,
        max_folder_bytes: int,
    ) -> None:
        """Start the thread.

        Args:
            name: Of the thread.
            destinations: Asked for each copy; they are tried in turn.
            timeout_s: For one copy, all tries together. Half of what is left goes to each, so
                that one that stalls leaves time for the next, and all of it to the last.
            max_pending_bytes: Copies that wait; further ones are not taken.
            max_folder_bytes: Of all copies in a folder.
        """
        self._destinations = destinations
        self._timeout_s = timeout_s
        self._max_pending_bytes = max_pending_bytes
        self._max_folder_bytes = max_folder_bytes
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._is_closed = False
        self._call = OpenCall()
        self._num_sent = self._num_failed = self._sent_bytes = 0
        self._sent_s = 0.0
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{name}-sender", daemon=True)
        self._thread.start()

    @property
    def num_sent(self) -> int:
        """Copies that have arrived."""
        with self._lock:
            return self._num_sent

    @property
    def num_failed(self) -> int:
        """Copies that were taken and have not arrived."""
        with self._lock:
            return self._num_failed

    @property
    def sent_bytes(self) -> int:
        """Bytes of the copies that have arrived."""
        with self._lock:
            return self._sent_bytes

    @property
    def bytes_per_s(self) -> float | None:
        """Of the copies that have arrived, with their encoding; None before the first."""
        with self._lock:
            return self._sent_bytes / self._sent_s if self._sent_s > 0 else None

    def try_send(self, snapshot: RequestSnapshot, name: str, done: Done) -> bool:
        """Send a copy, or return False when too much waits or it is closed. Never blocks.

        `done` is called once for each copy taken, from the sender's thread, with its place or the
        error.
        """
        with self._lock:
            if self._is_closed or (
                self._pending_bytes + snapshot.num_bytes > self._max_pending_bytes
            ):
                return False
            self._pending_bytes += snapshot.num_bytes
            self._orders.put(_Order(snapshot, name, done))
        return True

    def close(self) -> None:
        """Give up what waits and what is on its way; every `done` is called. Idempotent.

        Returns when the thread has ended, at the latest a second after the transfer's time.
        """
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._orders.put(None)
            self._call.end()
        self._thread.join(self._timeout_s + 1)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            result: SnapshotPlace | ServingError
            try:
                started = time.monotonic()
                result = self._send(order)
                self._count(result, time.monotonic() - started)
            except ServingError as exc:
                result = exc
            except Exception as exc:
                # The thread's outermost loop: one copy that fails must not end it.
                logger.exception("a snapshot could not be sent")
                result = SnapshotError(f"snapshot {order.name} failed: {exc}")
            with self._lock:
                self._pending_bytes -= order.snapshot.num_bytes
                self._num_failed += isinstance(result, ServingError)
            _tell(order, result)

    def _count(self, place: SnapshotPlace, seconds: float) -> None:
        with self._lock:
            self._num_sent += 1
            self._sent_bytes += place.num_bytes
            self._sent_s += seconds

    def _send(self, order: _Order) -> SnapshotPlace:
        if self._is_closed:
            raise WorkerError(f"snapshot {order.name} is not sent: its worker stops")
        deadline = time.monotonic() + self._timeout_s
        data = encode_snapshot(order.snapshot)
        failure: ServingError = SnapshotError(
            f"snapshot {order.name} has nowhere to go: there is no other attention worker and no "
            "attention_pool.snapshots.folder"
        )
        destinations = self._destinations()
        for index, destination in enumerate(destinations):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._is_closed:
                break
            is_last = index == len(destinations) - 1
            try:
                self._put(destination, order.name, data, left_s if is_last else left_s / 2)
            except ServingError as exc:
                failure = exc
                continue
            return SnapshotPlace(
                destination.address,
                order.name,
                order.snapshot.position,
                len(data),
                destination.worker,
            )
        raise failure

    def _put(self, destination: Destination, name: str, data: bytes, timeout_s: float) -> None:
        address = destination.address
        if address.startswith(FOLDER_SCHEME):
            folder = Path(address.removeprefix(FOLDER_SCHEME))
            FolderVault(folder, max_bytes=self._max_folder_bytes).save(name, data)
        else:
            put_snapshot(address, name, data, timeout_s=timeout_s, call=self._call)


def _tell(order: _Order, result: SnapshotPlace | ServingError) -> None:
    try:
        order.done(result)
    except Exception:
        # The thread's outermost loop: the other copies must go on.
        logger.exception("the end of the transfer of snapshot %s was not taken", order.name)
