"""How copies of requests leave and reach one attention worker: vault, sender and loader together.

Copies go to a folder that all workers share, or into the memory of another attention worker, and
each worker's vault takes those of the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.attention_worker import SnapshotTransfer
from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import SnapshotPlace
from actors.snapshots.loader import SnapshotLoader
from actors.snapshots.memory import MemoryVault
from actors.snapshots.sender import FOLDER_SCHEME, Destination, SnapshotSender
from actors.snapshots.server import VaultServer
from actors.worker_settings import AttentionServiceSettings
from configs.errors import ServingError
from configs.ids import WorkerId

logger = logging.getLogger(__name__)
MAX_PENDING_COPIES = 4
"""Copies that wait to be sent or fetched, of the largest size that a vault holds in sum."""


@dataclass(frozen=True, slots=True)
class SnapshotPeer:
    """The vault of another attention worker."""

    worker: WorkerId
    address: str


class SnapshotTransport:
    """Belongs to one attention service."""

    def __init__(self, settings: AttentionServiceSettings) -> None:
        """Open the vault; raises `TransportError` if it cannot listen."""
        self._settings = settings
        self._lock = threading.Lock()
        self._peers: tuple[SnapshotPeer, ...] = ()
        self._next_peer = 0
        snapshots = settings.snapshots
        self._vault = MemoryVault(snapshots.max_stored_bytes)
        self._server = _open_server(settings, self._vault)
        self.address = self._server.start()
        self._sender = SnapshotSender(
            f"snapshots-{settings.worker}",
            destinations=self._destinations,
            timeout_s=snapshots.transfer_timeout_s,
            max_pending_bytes=snapshots.max_stored_bytes,
            max_folder_bytes=snapshots.max_stored_bytes,
        )
        self._loader = SnapshotLoader(
            f"snapshots-{settings.worker}",
            own=self._vault,
            own_address=self.address,
            timeout_s=snapshots.transfer_timeout_s,
            max_pending=MAX_PENDING_COPIES,
            max_bytes=snapshots.max_stored_bytes,
        )

    @property
    def transfer(self) -> SnapshotTransfer:
        """For the worker."""
        return SnapshotTransfer(
            outlet=self._sender,
            inlet=self,
            copy_interval_tokens=self._settings.snapshots.copy_interval_tokens,
        )

    def try_load(
        self, place: SnapshotPlace, done: Callable[[RequestSnapshot | ServingError], None]
    ) -> bool:
        """Fetch a copy as `SnapshotLoader.try_load`, but from places of this cluster only."""
        if place.address not in self._places():
            logger.warning(
                "request copy %s is not fetched from %s: it is no place of this cluster",
                place.name,
                place.address,
            )
            return False
        return self._loader.try_load(place, done)

    def set_peers(self, peers: Sequence[SnapshotPeer]) -> None:
        """Send copies to these from now on; the worker itself may be among them."""
        others = tuple(peer for peer in peers if peer.worker != self._settings.worker)
        with self._lock:
            self._peers = others

    def close(self) -> None:
        """End all threads. Idempotent."""
        self._sender.close()
        self._loader.close()
        self._server.close()

    def _places(self) -> set[str]:
        """Where copies may lie."""
        with self._lock:
            places = {self.address, *(peer.address for peer in self._peers)}
        folder = self._settings.snapshots.folder
        return places if folder is None else {*places, f"{FOLDER_SCHEME}{folder}"}

    def _destinations(self) -> list[Destination]:
        """Where the next copy goes, in order of preference; peers take turns."""
        folder = self._settings.snapshots.folder
        if folder is not None:
            return [Destination(f"{FOLDER_SCHEME}{folder}", WorkerId(""))]
        with self._lock:
            if not self._peers:
                return []
            first = self._next_peer % len(self._peers)
            self._next_peer += 1
            turned = self._peers[first:] + self._peers[:first]
        return [Destination(peer.address, peer.worker) for peer in turned]


def _open_server(settings: AttentionServiceSettings, vault: MemoryVault) -> VaultServer:
    if settings.host is None:
        settings.sockets.mkdir(parents=True, exist_ok=True)
        return VaultServer(vault, unix_path=settings.sockets / f"{settings.worker}-vault.sock")
    return VaultServer(vault, host=settings.host)
