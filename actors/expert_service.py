"""An expert worker with everything it needs in one process: expert slots, listeners, one thread.

`load`, and it serves; `stop` ends it. Knows nothing of Ray. The serving thread owns the plain
`ExpertWorker`; the methods here may be called from any other thread, one at a time but `stats`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from actors.expert_store import ExpertStore, ExpertStoreSettings
from actors.expert_worker import ExpertWorker, ExpertWorkerSettings
from actors.worker_settings import ExpertServiceSettings
from actors.worker_stats import ExpertServiceStats
from model.checkpoint import Checkpoint
from model.experts import Activation
from router.combine import TORCH_TYPES
from router.membership import ExpertWorkerInfo
from router.placement import Placement

STOP_TIMEOUT_S = 10.0


class ExpertService:
    """One expert worker in this process."""

    def __init__(self, settings: ExpertServiceSettings) -> None:
        """Take the settings; nothing is loaded yet."""
        self._settings = settings
        self._stop = threading.Event()
        self._store: ExpertStore | None = None
        self._worker: ExpertWorker | None = None
        self._thread: threading.Thread | None = None

    def load(self, placement: Placement) -> ExpertWorkerInfo:
        """Load the experts that `placement` gives this worker, and serve them. Call once.

        Returns:
            How this worker is reached.

        Raises:
            CheckpointError: The checkpoint cannot be read.
            DeviceTooSmallError: The experts exceed the budget.
            TransportError: A listener cannot be opened.
        """
        settings = self._settings
        compute = settings.compute
        torch.set_num_threads(compute.num_threads)
        checkpoint = Checkpoint.open(compute.checkpoint, mla_norm_eps=compute.mla_norm_eps)
        dims = checkpoint.dims
        self._store = ExpertStore(
            worker=settings.worker,
            settings=ExpertStoreSettings(
                latent_size=dims.moe.latent_size,
                activation=Activation.of(dims),
                numerics=compute.numerics,
                dtype=TORCH_TYPES[compute.dtype],
                device=torch.device(compute.device),
                memory_bytes=settings.memory_bytes,
            ),
        )
        self._store.load(placement, checkpoint)
        self._worker = ExpertWorker(
            worker=settings.worker,
            compute=self._store,
            settings=ExpertWorkerSettings(
                merge_window_s=settings.merge_window_s, spin_s=settings.spin_s
            ),
        )
        listening: Future[ExpertWorkerInfo] = Future()
        self._thread = threading.Thread(
            target=self._serve,
            args=(self._worker, listening),
            name=f"experts-{settings.worker}",
            daemon=True,
        )
        self._thread.start()
        return listening.result()

    def stats(self) -> ExpertServiceStats:
        """Return levels and totals; zeros before `load`."""
        if self._store is None or self._worker is None:
            return ExpertServiceStats(0, 0, 0, 0, 0, 0.0)
        stats = self._worker.stats
        return ExpertServiceStats(
            num_expert_slots=self._store.num_experts,
            weight_bytes=self._store.num_bytes,
            pairs=stats.pairs,
            weight_reads=stats.expert_weight_reads,
            frames=stats.frames,
            busy_s=stats.busy_s,
        )

    def stop(self) -> None:
        """End the thread, its links and its listeners. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _serve(self, worker: ExpertWorker, listening: Future[ExpertWorkerInfo]) -> None:
        # The number of threads belongs to the thread that computes.
        torch.set_num_threads(self._settings.compute.num_threads)
        settings = self._settings
        try:
            try:
                listening.set_result(
                    worker.listen(
                        directory=settings.sockets,
                        host=settings.host,
                        transports=settings.transports,
                    )
                )
            except Exception as exc:  # noqa: BLE001 - handed to the caller through the future.
                listening.set_exception(exc)
                return
            worker.serve(self._stop)
        finally:
            worker.close()
