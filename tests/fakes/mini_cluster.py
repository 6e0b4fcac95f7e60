"""Real attention and expert workers over a real checkpoint, as threads of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.attention_worker import AttentionWorker
from actors.engine.admission import EngineLimits
from actors.engine.outcome import EngineStats
from actors.engine.step_loop import Engine
from actors.expert_store import ExpertStore, ExpertStoreSettings
from actors.expert_worker import ExpertWorker, ExpertWorkerSettings
from configs.ids import GatewayId, Generation, WorkerId
from configs.numerics import Numerics
from model.cache import allocate_memory
from model.checkpoint import Checkpoint
from model.decoder import Decoder
from model.experts import Activation
from router.latent_router import LatentRouter
from router.membership import Membership
from router.placement import Placement, plan_initial_placement
from router.settings import RouterSettings
from router.transport.connect import TransportKind
from tests.fakes.recording_sink import WAIT_S, RecordingSink

CPU = torch.device("cpu")
GATEWAY = GatewayId("gateway-0")
MINI_LIMITS = {
    "context_tokens": 512,
    "num_blocks": 64,
    "block_tokens": 16,
    "num_state_slots": 8,
    "max_step_tokens": 64,
    "max_queued_requests": 32,
}


@dataclass
class MiniAttention:
    """One attention worker with one gateway."""

    worker: AttentionWorker
    router: LatentRouter
    engine: Engine
    sink: RecordingSink

    def stats(self) -> EngineStats:
        """Engine statistics, read on the engine thread after what was sent before."""
        return self.worker.call(self.engine.stats).result(WAIT_S)

    def assert_memory_is_free(self) -> None:
        stats = self.stats()
        assert (stats.num_used_blocks, stats.num_used_slots) == (0, 0)
        assert stats.num_free_blocks == self.engine.limits.num_blocks
        assert stats.num_free_slots == self.engine.limits.num_state_slots


class MiniExpert:
    """One expert worker in a thread."""

    def __init__(self, worker: ExpertWorker, directory: Path, transport: TransportKind) -> None:
        self.worker = worker
        self.info = worker.listen(directory=directory, host="127.0.0.1", transports=(transport,))
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_compute_alone, args=(lambda: worker.serve(self._stop),)
        )
        self._thread.start()

    def end(self) -> None:
        """End the worker; its peers see closed links. Idempotent."""
        self._stop.set()
        self._thread.join(WAIT_S)
        self.worker.close()
        assert not self._thread.is_alive()


@dataclass
class MiniCluster:
    """Running workers."""

    attention: list[MiniAttention]
    experts: list[MiniExpert]


def load_store(
    checkpoint: Checkpoint, worker: WorkerId, placement: Placement, numerics: Numerics
) -> ExpertStore:
    store = ExpertStore(
        worker=worker,
        settings=ExpertStoreSettings(
            latent_size=checkpoint.dims.moe.latent_size,
            activation=Activation.of(checkpoint.dims),
            numerics=numerics,
            dtype=torch.float32,
            device=CPU,
        ),
    )
    store.load(placement, checkpoint)
    return store


def make_engine(
    checkpoint: Checkpoint, router: LatentRouter, numerics: Numerics, **changes: int
) -> Engine:
    dims = checkpoint.dims
    limits = EngineLimits(vocab_size=dims.vocab_size, **{**MINI_LIMITS, **changes})
    return Engine(
        model=Decoder(
            dims, checkpoint.load_attention_side(dtype=torch.float32, device=CPU), numerics=numerics
        ),
        memory=allocate_memory(
            dims,
            num_blocks=limits.num_blocks,
            block_size=limits.block_tokens,
            num_slots=limits.num_state_slots,
            dtype=torch.float32,
            device=CPU,
        ),
        router=router,
        limits=limits,
        clock=time.monotonic,
        wait_timeout_s=WAIT_S,
    )


@contextmanager
def mini_cluster(
    checkpoint: Checkpoint,
    *,
    num_attention: int,
    num_experts: int,
    transport: TransportKind,
    directory: Path,
    numerics: Numerics = Numerics.FAST,
    **limits: int,
) -> Iterator[MiniCluster]:
    """Start workers; end them and check that no thread is left."""
    dims = checkpoint.dims
    names = [WorkerId(f"expert-{i}-{directory.name}") for i in range(num_experts)]
    placement = plan_initial_placement(
        moe_layers=dims.moe_layers, num_experts=dims.moe.num_experts, workers=names
    )
    with ExitStack() as stack:
        experts = []
        for name in names:
            worker = ExpertWorker(
                worker=name,
                compute=load_store(checkpoint, name, placement, numerics),
                settings=ExpertWorkerSettings(),
            )
            experts.append(MiniExpert(worker, directory, transport))
            stack.callback(experts[-1].end)
        membership = Membership(Generation(1), tuple(expert.info for expert in experts))
        attention = []
        for index in range(num_attention):
            router = LatentRouter(
                worker=WorkerId(f"attention-{index}"),
                settings=RouterSettings(latent_size=dims.moe.latent_size, transport=transport),
            )
            engine = make_engine(checkpoint, router, numerics, **limits)
            worker = AttentionWorker(
                worker=WorkerId(f"attention-{index}"), engine=engine, clock=time.monotonic
            )
            stack.enter_context(_running(worker, router))
            worker.call(lambda router=router: router.connect(membership)).result(WAIT_S)
            worker.call(lambda router=router: router.set_placement(placement)).result(WAIT_S)
            sink = RecordingSink()
            worker.connect(GATEWAY, sink)
            attention.append(MiniAttention(worker, router, engine, sink))
        yield MiniCluster(attention, experts)


def _compute_alone(run: Callable[[], None]) -> None:
    # The number of threads of a matrix product belongs to the thread that asks for it, and several
    # workers that each spin on all cores of a small machine stand in each other's way.
    torch.set_num_threads(1)
    run()


@contextmanager
def _running(worker: AttentionWorker, router: LatentRouter) -> Iterator[None]:
    thread = threading.Thread(target=_compute_alone, args=(worker.run,))
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        thread.join(WAIT_S)
        router.close()
        assert not thread.is_alive()
