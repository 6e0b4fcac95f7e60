"""The Ray shell of an attention worker: process, name and threads. No logic of its own."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import replace

import ray

from actors.attention_service import AttentionService
from actors.load_recorder import LoadRows
from actors.snapshot_transport import SnapshotPeer
from actors.worker_settings import NODE_HOST, AttentionServiceSettings
from actors.worker_stats import AttentionServiceStats, WorkerIdentity
from router.membership import Membership
from router.placement import Placement


class AttentionWorkerActor:
    """An attention worker as Ray sees it. The concurrency groups are the gateway's to define."""

    def __init__(self, settings: AttentionServiceSettings) -> None:
        if settings.host == NODE_HOST:
            settings = replace(settings, host=ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray
        self._settings = settings
        self._service = AttentionService(settings)
        self._stopped = threading.Event()

    def load(self) -> WorkerIdentity:
        """Load weights and allocate caches; see `AttentionService.load`."""
        self._service.load()
        # What is loaded stays: collections, which stop the engine, need not look at it.
        gc.freeze()
        return self._identity()

    def connect(self, membership: Membership, placement: Placement) -> str:
        """Connect to expert workers; see `AttentionService.connect`."""
        return self._service.connect(membership, placement)

    def stop(self) -> None:
        """End everything but the process."""
        self._service.stop()
        self._stopped.set()

    def vault_address(self) -> str:
        """Where other attention workers send copies of their requests."""
        return self._service.vault_address

    def set_peers(self, peers: tuple[SnapshotPeer, ...]) -> None:
        """Send copies of requests to these vaults from now on."""
        self._service.set_peers(peers)

    @ray.method(concurrency_group="health")
    def move_out(self) -> None:
        """Refuse new requests, and move the others to other workers."""
        self._service.move_out()

    @ray.method(concurrency_group="health")
    def is_drained(self) -> bool:
        """Whether it drains and has no request left."""
        return self._service.is_drained

    @ray.method(concurrency_group="health")
    def drain(self) -> None:
        """Refuse new requests."""
        self._service.drain()

    @ray.method(concurrency_group="health")
    def stats(self) -> tuple[WorkerIdentity, AttentionServiceStats]:
        """Return where this worker runs and what it has done; answers while it is loading."""
        return self._identity(), self._service.stats()

    @ray.method(concurrency_group="health")
    def load_rows(self, after: int) -> LoadRows | None:
        """Return how many tokens picked each expert in steps from `after` on."""
        return self._service.load_rows(after)

    @ray.method(concurrency_group="waiting")
    def wait_until_serving(self, timeout_s: float) -> str:
        """Return the address of the request channel once there is one."""
        return self._service.wait_until_serving(timeout_s)

    @ray.method(concurrency_group="watch")
    def wait_until_stopped(self) -> None:
        """Return when `stop` has ended this worker; fails when its process ends before."""
        self._stopped.wait()

    def _identity(self) -> WorkerIdentity:
        context = ray.get_runtime_context()
        return WorkerIdentity(
            worker=self._settings.worker, pid=os.getpid(), node_id=context.get_node_id()
        )
