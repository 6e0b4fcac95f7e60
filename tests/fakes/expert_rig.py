"""Small random experts and expert workers around them, for tests of router and expert side."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from actors.expert_store import ExpertStore, ExpertStoreSettings
from actors.expert_worker import ExpertWorker, ExpertWorkerSettings
from configs.ids import Generation, WorkerId
from configs.numerics import Numerics
from model.experts import Activation, expert_ffn
from model.reference import ReferenceDispatcher
from model.weight_tree import ExpertWeights
from router.latent_router import LatentRouter
from router.membership import ExpertWorkerInfo, Membership
from router.placement import Placement, plan_initial_placement
from router.settings import RouterSettings
from router.ticket import RouterTicket
from router.transport.connect import TransportKind

NUM_EXPERTS = 9
LATENT_SIZE = 16
EXPERT_HIDDEN_SIZE = 24
LAYERS = (1, 2)
ACTIVATION = Activation(beta=4.0, linear_beta=25.0)
CPU = torch.device("cpu")


class RandomExperts:
    """An `ExpertSource` of random dense weights."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def matrix(num_out: int, num_in: int) -> Tensor:
            return torch.randn(num_out, num_in, generator=generator) / num_in**0.5

        self.weights = {
            (layer, expert): ExpertWeights(
                gate=matrix(EXPERT_HIDDEN_SIZE, LATENT_SIZE),
                up=matrix(EXPERT_HIDDEN_SIZE, LATENT_SIZE),
                down=matrix(LATENT_SIZE, EXPERT_HIDDEN_SIZE),
            )
            for layer in LAYERS
            for expert in range(NUM_EXPERTS)
        }
        self.loaded: list[tuple[int, int]] = []

    def load_expert(
        self, layer: int, expert: int, *, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        self.loaded.append((layer, expert))
        weights = self.weights[layer, expert]
        return ExpertWeights(
            *(
                matrix.to(device, dtype)
                for matrix in (weights.gate, weights.up, weights.down)
                if isinstance(matrix, Tensor)
            )
        )

    def expert_bytes(self, dtype: torch.dtype) -> int:
        return 3 * EXPERT_HIDDEN_SIZE * LATENT_SIZE * dtype.itemsize

    def reference(self) -> ReferenceDispatcher:
        """The slow twin over the same experts."""

        def compute(layer: int, expert_id: int, z_NL: Tensor) -> Tensor:
            return expert_ffn(
                self.weights[layer, expert_id],
                z_NL,
                activation=ACTIVATION,
                numerics=Numerics.INVARIANT,
            )

        return ReferenceDispatcher(compute)


def worker_names(count: int) -> list[WorkerId]:
    return [WorkerId(f"expert-{i}") for i in range(count)]


def place(workers: Sequence[WorkerId]) -> Placement:
    return plan_initial_placement(moe_layers=LAYERS, num_experts=NUM_EXPERTS, workers=workers)


def store_settings(
    *, dtype: torch.dtype = torch.float32, memory_bytes: int | None = None
) -> ExpertStoreSettings:
    return ExpertStoreSettings(
        latent_size=LATENT_SIZE,
        activation=ACTIVATION,
        numerics=Numerics.INVARIANT,
        dtype=dtype,
        device=CPU,
        memory_bytes=memory_bytes,
    )


def make_store(
    worker: WorkerId,
    placement: Placement,
    source: RandomExperts,
    *,
    dtype: torch.dtype = torch.float32,
) -> ExpertStore:
    store = ExpertStore(worker=worker, settings=store_settings(dtype=dtype))
    store.load(placement, source)
    return store


def make_worker(
    worker: WorkerId,
    placement: Placement,
    source: RandomExperts,
    folder: Path,
    *,
    kind: TransportKind = "local",
    settings: ExpertWorkerSettings | None = None,
) -> tuple[ExpertWorker, ExpertWorkerInfo]:
    made = ExpertWorker(
        worker=worker,
        compute=make_store(worker, placement, source),
        settings=ExpertWorkerSettings(spin_s=0.0) if settings is None else settings,
    )
    return made, made.listen(directory=folder, host="127.0.0.1", transports=[kind])


@contextlib.contextmanager
def serving(workers: Sequence[ExpertWorker]) -> Iterator[None]:
    """Serve on a thread per worker; closes them afterwards."""
    stop = threading.Event()
    threads = [threading.Thread(target=worker.serve, args=(stop,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()


@contextlib.contextmanager
def accepting(workers: Sequence[ExpertWorker]) -> Iterator[None]:
    """Serve on threads while the caller connects; the workers stay open afterwards."""
    stop = threading.Event()
    threads = [threading.Thread(target=worker.serve, args=(stop,)) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def make_router(
    infos: Sequence[ExpertWorkerInfo],
    placement: Placement,
    settings: RouterSettings,
    *,
    name: str = "attention-0",
    generation: int = 1,
) -> LatentRouter:
    router = LatentRouter(worker=WorkerId(name), settings=settings)
    router.connect(Membership(Generation(generation), tuple(infos)))
    router.set_placement(placement)
    return router


def choices(num_tokens: int, num_picks: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random latents, distinct expert ids and weights."""
    generator = torch.Generator().manual_seed(seed)
    z_TL = torch.randn(num_tokens, LATENT_SIZE, generator=generator)
    ids_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :num_picks]
    weights_TK = torch.rand(num_tokens, num_picks, generator=generator)
    return z_TL, ids_TK.contiguous(), weights_TK


def pump(worker: ExpertWorker, ticket: RouterTicket) -> None:
    """Step a worker of this thread until a ticket is ready."""
    deadline = time.monotonic() + 20
    while not ticket.is_ready():
        worker.step()
        if time.monotonic() > deadline:
            raise TimeoutError("the worker does not answer")
