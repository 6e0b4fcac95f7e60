"""Expert workers in processes of their own, without Ray, against an engine in this process."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.expert_worker import ExpertWorker, ExpertWorkerSettings
from actors.request_channel import Sampling, Submit
from configs.ids import Generation, RequestId, WorkerId
from configs.numerics import Numerics
from model.checkpoint import Checkpoint
from router.latent_router import LatentRouter
from router.membership import Membership
from router.placement import plan_initial_placement
from router.settings import RouterSettings
from tests.fakes.mini_cluster import load_store, make_engine

NUM_EXPERTS = 2
NUM_TOKENS = 64
WAIT_S = 60.0


def serve(folder: Path, sockets: Path, worker: WorkerId, names: list[WorkerId], pipe: Connection):
    """Body of an expert process: serve until the parent says stop or is gone."""
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(folder)
    placement = plan_initial_placement(
        moe_layers=checkpoint.dims.moe_layers,
        num_experts=checkpoint.dims.moe.num_experts,
        workers=names,
    )
    store = load_store(checkpoint, worker, placement, Numerics.FAST)
    expert = ExpertWorker(worker=worker, compute=store, settings=ExpertWorkerSettings())
    pipe.send(expert.listen(directory=sockets, host="127.0.0.1", transports=("shm", "tcp")))
    while not pipe.poll():
        expert.step(wait_s=0.02)
    expert.close()


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="lmt-"))
    yield path
    assert list(path.iterdir()) == []  # Nothing is left after the workers have ended.
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def checkpoint(golden_dir: Path) -> Checkpoint:
    return Checkpoint.open(golden_dir / "mini")


@pytest.fixture(scope="module")
def membership(golden_dir: Path, sockets: Path) -> Iterator[Membership]:
    context = multiprocessing.get_context("spawn")
    names = [WorkerId(f"expert-{i}") for i in range(NUM_EXPERTS)]
    pipes, processes = [], []
    for name in names:
        here, there = context.Pipe()
        process = context.Process(
            target=serve, args=(golden_dir / "mini", sockets, name, names, there)
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        assert all(pipe.poll(WAIT_S) for pipe in pipes)
        yield Membership(Generation(1), tuple(pipe.recv() for pipe in pipes))
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0] * NUM_EXPERTS


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_expert_processes_give_the_golden_tokens(
    checkpoint: Checkpoint, golden_dir: Path, membership: Membership, transport: str
) -> None:
    with np.load(golden_dir / "mini" / "golden.npz") as golden:
        prompt, greedy = golden["tokens"].tolist(), golden["greedy"].tolist()
    dims = checkpoint.dims
    router = LatentRouter(
        worker=WorkerId("attention-0"),
        settings=RouterSettings(latent_size=dims.moe.latent_size, transport=transport),
    )
    router.connect(membership)
    router.set_placement(
        plan_initial_placement(
            moe_layers=dims.moe_layers,
            num_experts=dims.moe.num_experts,
            workers=[info.worker for info in membership.expert_workers],
        )
    )
    engine = make_engine(checkpoint, router, Numerics.FAST)
    engine.submit(Submit(RequestId("r"), 0, prompt, NUM_TOKENS, Sampling(), []), 0.0)
    tokens: list[int] = []
    while engine.num_live:
        tokens += [token for news in engine.step(0.0).tokens for token in news.token_ids]
    router.close()
    assert tokens == greedy[:NUM_TOKENS]
