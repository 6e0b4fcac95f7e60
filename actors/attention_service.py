"""An attention worker with everything it needs in one process: weights, engine, router, servers.

`load`, then `connect`, then requests are served; `stop` ends it. Knows nothing of Ray. The engine
thread owns engine and router; the methods here may be called from any other thread, `load`,
`connect` and `stop` by one at a time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

import torch

from actors.attention_worker import AttentionWorker
from actors.engine.admission import EngineLimits, SnapshotLimits
from actors.engine.outcome import EngineStats
from actors.engine.request_memory import num_scratch
from actors.engine.step_loop import Engine
from actors.grammar_loading import load_grammars
from actors.load_recorder import MAX_ROWS, LoadRecorder, LoadRows
from actors.request_server import RequestServer
from actors.snapshot_transport import SnapshotPeer, SnapshotTransport
from actors.worker_settings import AttentionServiceSettings
from actors.worker_stats import AttentionServiceStats
from configs.errors import WorkerError
from configs.numerics import Numerics
from model.cache import allocate_memory
from model.checkpoint import Checkpoint, tree_bytes
from model.decoder import Decoder
from model.dims import ModelDims
from model.fingerprint import fingerprint
from router.combine import TORCH_TYPES
from router.latent_router import LatentRouter
from router.membership import Membership
from router.placement import Placement
from router.replica_choice import warm_up
from router.settings import RouterCounters
from router.transport.connect import host_token

STOP_TIMEOUT_S = 10.0
CONNECT_MARGIN = 2
"""A step may have to end before the engine connects: this many times the timeout for connecting."""
_NO_TRAFFIC = RouterCounters(0, 0, 0, 0, 0, 0, 0, 0, 0)


class AttentionService:
    """One attention worker in this process."""

    def __init__(self, settings: AttentionServiceSettings) -> None:
        """Take the settings; nothing is loaded yet."""
        self._settings = settings
        self._router: LatentRouter | None = None
        self._worker: AttentionWorker | None = None
        self._server: RequestServer | None = None
        self._thread: threading.Thread | None = None
        self._memory_bytes = 0
        self._transports: tuple[str, ...] = ()
        self._address = ""
        self._snapshots: SnapshotTransport | None = None
        self._recorder: LoadRecorder | None = None
        self._is_serving = threading.Event()

    def load(self) -> None:
        """Load the weights, allocate the caches and start the engine.

        Raises:
            CheckpointError: The checkpoint cannot be read.
        """
        settings = self._settings
        compute = settings.compute
        torch.set_num_threads(compute.num_threads)
        warm_up()
        checkpoint = Checkpoint.open(compute.checkpoint, mla_norm_eps=compute.mla_norm_eps)
        dims = checkpoint.dims
        dtype = TORCH_TYPES[compute.dtype]
        device = torch.device(compute.device)
        weights = checkpoint.load_attention_side(dtype=dtype, device=device)
        memory = allocate_memory(
            dims,
            num_blocks=settings.num_blocks,
            block_size=settings.block_tokens,
            num_slots=settings.num_state_slots + num_scratch(settings.snapshots.memory_bytes),
            dtype=dtype,
            device=device,
        )
        self._memory_bytes = tree_bytes(weights) + tree_bytes(memory)
        self._recorder = self._make_recorder(dims)
        self._router = LatentRouter(
            worker=settings.worker,
            settings=replace(settings.router, latent_size=dims.moe.latent_size),
            observer=self._recorder,
        )
        engine = Engine(
            model=Decoder(dims, weights, numerics=compute.numerics),
            memory=memory,
            router=self._router,
            limits=self._limits(dims.vocab_size),
            clock=time.monotonic,
            wait_timeout_s=settings.router.dispatch_timeout_s,
            grammars=load_grammars(checkpoint),
            fingerprint=fingerprint(
                compute.checkpoint,
                dtype=compute.dtype,
                numerics=compute.numerics,
                mla_norm_eps=compute.mla_norm_eps,
                num_threads=compute.num_threads,
            ),
        )
        self._snapshots = SnapshotTransport(settings)
        self._worker = AttentionWorker(
            worker=settings.worker,
            engine=engine,
            clock=time.monotonic,
            snapshots=self._snapshots.transfer,
            after_step=(lambda: None) if self._recorder is None else self._recorder.end_step,
        )
        self._thread = threading.Thread(
            target=self._run_engine, name=f"engine-{settings.worker}", daemon=True
        )
        self._thread.start()

    @property
    def vault_address(self) -> str:
        """Where other attention workers send copies of their requests.

        Raises:
            WorkerError: Called before `load`.
        """
        if self._snapshots is None:
            raise WorkerError(f"{self._settings.worker} has no vault before it is loaded")
        return self._snapshots.address

    def set_peers(self, peers: Sequence[SnapshotPeer]) -> None:
        """Send copies of requests to these vaults from now on; its own is left out."""
        if self._snapshots is not None:
            self._snapshots.set_peers(peers)

    def connect(self, membership: Membership, placement: Placement) -> str:
        """Connect to the expert workers and use `placement`; on the first call, take requests.

        Returns:
            Address of the request channel.

        Raises:
            WorkerError: Called before `load`, or the engine is stuck.
            TransportError: An expert worker cannot be reached.
        """
        router, worker = self._router, self._worker
        if router is None or worker is None:
            raise WorkerError(f"{self._settings.worker} was told to connect before it was loaded")

        def _connect() -> None:
            router.connect(membership)
            router.set_placement(placement)

        timeout_s = CONNECT_MARGIN * self._settings.router.connect_timeout_s
        try:
            worker.call(_connect).result(timeout_s)
        except FutureTimeoutError as exc:
            raise WorkerError(
                f"the engine of {self._settings.worker} did not connect in {timeout_s:g} s"
            ) from exc
        worker.set_generation(membership.generation)
        self._transports = self._transports_to(membership)
        if self._server is None:
            self._address = self._serve_requests(worker)
            self._is_serving.set()
        return self._address

    def wait_until_serving(self, timeout_s: float) -> str:
        """Return the address of the request channel once there is one.

        Raises:
            WorkerError: There is none in time.
        """
        if not self._is_serving.wait(timeout_s):
            raise WorkerError(f"{self._settings.worker} takes no requests after {timeout_s:g} s")
        return self._address

    def stats(self) -> AttentionServiceStats:
        """Return levels and totals; zeros before `load`."""
        settings = self._settings
        counters = _NO_TRAFFIC if self._router is None else self._router.counters
        engine = None if self._worker is None else self._worker.stats
        return AttentionServiceStats(
            running_requests=engine.num_running if engine else 0,
            queued_requests=engine.num_queued if engine else 0,
            used_blocks=engine.num_used_blocks if engine else 0,
            total_blocks=settings.num_blocks,
            used_slots=engine.num_used_slots if engine else 0,
            total_slots=settings.num_state_slots,
            prompt_tokens=engine.prompt_tokens_total if engine else 0,
            output_tokens=engine.generated_tokens_total if engine else 0,
            latent_bytes_sent=counters.latent_bytes_out,
            wire_bytes_sent=counters.bytes_out,
            wire_bytes_received=counters.bytes_in,
            latents_sent=counters.tokens_out,
            memory_bytes=self._memory_bytes,
            transports=self._transports,
            **({} if engine is None else _reuse_stats(engine)),
        )

    def load_rows(self, after: int, max_rows: int = MAX_ROWS) -> LoadRows | None:
        """Return how many tokens picked each expert in steps from `after` on; None counts none."""
        return None if self._recorder is None else self._recorder.read(after, max_rows)

    def drain(self) -> None:
        """Refuse new requests; running ones go on."""
        if self._worker is not None:
            self._worker.drain()

    def move_out(self) -> None:
        """Refuse new requests, and move the others to other workers; see `is_drained`."""
        if self._worker is not None:
            self._worker.move_out()

    @property
    def is_drained(self) -> bool:
        """Whether it drains and has no request left."""
        return self._worker is not None and self._worker.is_drained

    def stop(self) -> None:
        """End requests, servers, links and threads. Idempotent."""
        if self._worker is not None:
            self._worker.stop()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        # After the engine, so that the last reports reach the gateways.
        if self._server is not None:
            self._server.close()
        if self._snapshots is not None:
            self._snapshots.close()
        if self._router is not None:
            self._router.close()

    def _make_recorder(self, dims: ModelDims) -> LoadRecorder | None:
        settings = self._settings
        if settings.load_window_steps == 0 or not dims.moe_layers:
            return None
        return LoadRecorder(
            layers=dims.moe_layers,
            num_experts=dims.moe.num_experts,
            num_rows=settings.load_window_steps,
            max_step_tokens=settings.max_step_tokens,
        )

    def _limits(self, vocab_size: int) -> EngineLimits:
        settings, snapshots = self._settings, self._settings.snapshots
        return EngineLimits(
            vocab_size=vocab_size,
            context_tokens=settings.context_tokens,
            num_blocks=settings.num_blocks,
            block_tokens=settings.block_tokens,
            num_state_slots=settings.num_state_slots,
            max_step_tokens=settings.max_step_tokens,
            max_queued_requests=settings.max_queued_requests,
            snapshots=SnapshotLimits(
                max_bytes=snapshots.memory_bytes,
                interval_tokens=snapshots.interval_tokens,
                min_gain_tokens=snapshots.min_gain_tokens,
                are_forms_distinct=settings.compute.numerics is Numerics.INVARIANT,
            ),
        )

    def _run_engine(self) -> None:
        # The number of threads belongs to the thread that computes.
        torch.set_num_threads(self._settings.compute.num_threads)
        if self._worker is not None:
            self._worker.run()

    def _serve_requests(self, worker: AttentionWorker) -> str:
        settings = self._settings
        if settings.host is None:
            settings.sockets.mkdir(parents=True, exist_ok=True)
            path = settings.sockets / f"{settings.worker}.sock"
            self._server = RequestServer(worker, unix_path=path)
        else:
            self._server = RequestServer(worker, host=settings.host)
        return self._server.start()

    def _transports_to(self, membership: Membership) -> tuple[str, ...]:
        choice = self._settings.router.transport
        if choice != "auto":
            return tuple(choice for _ in membership.expert_workers)
        self._settings.sockets.mkdir(parents=True, exist_ok=True)
        own = host_token(self._settings.sockets)
        return tuple(
            "shm" if info.host_token == own else "tcp" for info in membership.expert_workers
        )


def _reuse_stats(engine: EngineStats) -> dict[str, int]:
    return {
        "cached_blocks": engine.num_cached_blocks,
        "prefix_snapshots": engine.num_prefix_snapshots,
        "snapshot_bytes": engine.prefix_snapshot_bytes + engine.request_copy_bytes,
        "prefix_hits": engine.prefix_hits_total,
        "prefix_hit_tokens": engine.prefix_hit_tokens_total,
        "preemptions": engine.kept_preemptions_total + engine.dropped_preemptions_total,
        "restores": engine.restores_total,
        "recomputed_tokens": engine.recomputed_tokens_total,
        "moved_requests": engine.moved_requests_total,
    }
