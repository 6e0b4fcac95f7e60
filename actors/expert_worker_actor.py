"""The Ray shell of an expert worker: process, name and threads. No logic of its own."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import ray

from actors.expert_service import ExpertService
from actors.worker_settings import NODE_HOST, ExpertServiceSettings
from actors.worker_stats import ExpertServiceStats, WorkerIdentity
from router.membership import ExpertWorkerInfo
from router.placement import Placement


class ExpertWorkerActor:
    """An expert worker as Ray sees it. The concurrency groups are the gateway's to define."""

    def __init__(self, settings: ExpertServiceSettings) -> None:
        if settings.host == NODE_HOST:
            settings = replace(settings, host=ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray
        self._settings = settings
        self._service = ExpertService(settings)
        self._stopped = threading.Event()

    def load(self, placement: Placement) -> tuple[WorkerIdentity, ExpertWorkerInfo]:
        """Load experts and serve them; see `ExpertService.load`."""
        info = self._service.load(placement)
        return self._identity(), info

    def stop(self) -> None:
        """End everything but the process."""
        self._service.stop()
        self._stopped.set()

    @ray.method(concurrency_group="health")
    def stats(self) -> tuple[WorkerIdentity, ExpertServiceStats]:
        """Return where this worker runs and what it has done; answers while it is loading."""
        return self._identity(), self._service.stats()

    @ray.method(concurrency_group="watch")
    def wait_until_stopped(self) -> None:
        """Return when `stop` has ended this worker; fails when its process ends before."""
        self._stopped.wait()

    def _identity(self) -> WorkerIdentity:
        context = ray.get_runtime_context()
        return WorkerIdentity(
            worker=self._settings.worker, pid=os.getpid(), node_id=context.get_node_id()
        )
