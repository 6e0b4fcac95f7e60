"""The router over real expert workers against its slow twin, over transports and worker counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from configs.numerics import Combine, FloatType
from model.dispatcher import Dispatcher
from router.frames import HEADER_BYTES, PAIR_BYTES
from router.latent_router import LatentRouter
from router.settings import RouterSettings
from router.transport.connect import TransportKind
from tests.fakes.expert_rig import (
    LATENT_SIZE,
    LAYERS,
    RandomExperts,
    choices,
    make_router,
    make_worker,
    place,
    serving,
    worker_names,
)
from tests.fakes.transport_rigs import RIGS

kinds = pytest.mark.parametrize("kind", [rig.kind for rig in RIGS])
worker_counts = pytest.mark.parametrize("num_workers", [1, 2, 3, 12], ids=lambda n: f"{n}-workers")


@contextmanager
def cluster(
    folder: Path,
    kind: TransportKind,
    num_workers: int,
    *,
    experts: RandomExperts,
    combine: Combine = Combine.CANONICAL,
    wire_dtype: FloatType = FloatType.FLOAT32,
    num_routers: int = 1,
) -> Iterator[list[LatentRouter]]:
    names = worker_names(num_workers)
    placement = place(names)
    made = [make_worker(name, placement, experts, folder, kind=kind) for name in names]
    settings = RouterSettings(
        latent_size=LATENT_SIZE,
        wire_dtype=wire_dtype,
        combine=combine,
        transport=kind,
        shm_bytes=1 << 16,
        spin_s=0.0,
    )
    with ExitStack() as stack:
        stack.enter_context(serving([worker for worker, _ in made]))
        routers = []
        for i in range(num_routers):
            infos = [info for _, info in made]
            router = make_router(infos, placement, settings, name=f"attention-{i}")
            stack.callback(router.close)
            routers.append(router)
        yield routers


def run(dispatcher: Dispatcher, layer: int, num_tokens: int, *, seed: int) -> torch.Tensor:
    return dispatcher.finish(dispatcher.begin(layer, *choices(num_tokens, 3, seed=seed)))


@kinds
@worker_counts
def test_canonical_sums_have_the_bits_of_the_twin(
    folder: Path, kind: TransportKind, num_workers: int
) -> None:
    experts = RandomExperts()
    with cluster(folder, kind, num_workers, experts=experts) as [router]:
        for step, num_tokens in enumerate([1, 0, 7, 40]):
            for layer in LAYERS:
                lane = router.lane(step=step, lane=0)
                found = run(lane, layer, num_tokens, seed=step)
                assert torch.equal(found, run(experts.reference(), layer, num_tokens, seed=step))


@kinds
@pytest.mark.parametrize("num_workers", [1, 3], ids=lambda n: f"{n}-workers")
def test_presummed_answers_are_close_to_the_twin(
    folder: Path, kind: TransportKind, num_workers: int
) -> None:
    experts = RandomExperts()
    options = {"experts": experts, "combine": Combine.PRESUM}
    with cluster(folder, kind, num_workers, **options) as [router]:
        for step, num_tokens in enumerate([1, 0, 40]):
            found = run(router.lane(step=step, lane=0), 1, num_tokens, seed=step)
            expected = run(experts.reference(), 1, num_tokens, seed=step)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_one_worker_presums_with_the_bits_of_the_twin(folder: Path) -> None:
    experts = RandomExperts()
    options = {"experts": experts, "combine": Combine.PRESUM}
    with cluster(folder, "shm", 1, **options) as [router]:
        found = run(router.lane(step=0, lane=0), 1, 20, seed=0)
    assert torch.equal(found, run(experts.reference(), 1, 20, seed=0))


def test_bfloat16_on_the_wire_has_the_same_bits_for_every_worker_count(folder: Path) -> None:
    experts = RandomExperts()
    sums = []
    for num_workers in (1, 2, 3):
        options = {"experts": experts, "wire_dtype": FloatType.BFLOAT16}
        with cluster(folder, "shm", num_workers, **options) as [router]:
            sums.append(run(router.lane(step=0, lane=0), 1, 20, seed=0))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
    torch.testing.assert_close(sums[0], run(experts.reference(), 1, 20, seed=0), rtol=0, atol=0.05)


@kinds
def test_lanes_in_flight_are_finished_in_any_order(folder: Path, kind: TransportKind) -> None:
    experts = RandomExperts()
    with cluster(folder, kind, 2, experts=experts) as [router]:
        lanes = [router.lane(step=0, lane=i) for i in range(3)]
        tickets = [
            lane.begin(layer, *choices(5, 3, seed=i * 10 + layer))
            for i, lane in enumerate(lanes)
            for layer in LAYERS
        ]
        seeds = [i * 10 + layer for i in range(3) for layer in LAYERS]
        for ticket, seed in reversed(list(zip(tickets, seeds, strict=True))):
            expected = run(experts.reference(), ticket.layer, 5, seed=seed)
            assert torch.equal(lanes[0].finish(ticket), expected)


@kinds
def test_several_attention_workers_get_their_own_answers(folder: Path, kind: TransportKind) -> None:
    experts = RandomExperts()
    with cluster(folder, kind, 2, experts=experts, num_routers=3) as routers:
        tickets = [
            router.begin(1, *choices(6, 3, seed=i), step=4, lane=0)
            for i, router in enumerate(routers)
        ]
        for i, (router, ticket) in enumerate(zip(routers, tickets, strict=True)):
            expected = run(experts.reference(), 1, 6, seed=i)
            assert torch.equal(router.finish(ticket), expected)


@pytest.mark.parametrize("wire_dtype", FloatType)
@pytest.mark.parametrize("num_workers", [1, 3], ids=lambda n: f"{n}-workers")
def test_only_latents_pairs_and_headers_cross(
    folder: Path, wire_dtype: FloatType, num_workers: int
) -> None:
    num_tokens, num_picks = 11, 3
    experts = RandomExperts()
    z_TL, ids_TK, weights_TK = choices(num_tokens, num_picks, seed=0)
    options = {"experts": experts, "wire_dtype": wire_dtype}
    with cluster(folder, "shm", num_workers, **options) as [router]:
        lane = router.lane(step=0, lane=0)
        lane.finish(lane.begin(1, z_TL, ids_TK, weights_TK))
        counters = router.counters
    holders = place(worker_names(num_workers)).layer(1).holders
    needed = {
        (token, holders[expert][0])
        for token, experts_K in enumerate(ids_TK.tolist())
        for expert in experts_K
    }
    num_frames = len({worker for _, worker in needed})
    row_bytes = LATENT_SIZE * wire_dtype.num_bytes
    assert counters.tokens_out == len(needed)
    assert counters.latent_bytes_out == len(needed) * row_bytes
    assert counters.pair_bytes_out == num_tokens * num_picks * PAIR_BYTES
    assert counters.header_bytes_out == num_frames * HEADER_BYTES
    assert counters.bytes_in == num_frames * HEADER_BYTES + num_tokens * num_picks * row_bytes


@pytest.mark.parametrize("combine", Combine)
def test_the_bytes_of_the_sockets_are_those_of_the_counters(folder: Path, combine: Combine) -> None:
    # What the expert workers see arriving is what the router says it sent.
    names = worker_names(2)
    placement = place(names)
    experts = RandomExperts()
    made = [make_worker(name, placement, experts, folder, kind="tcp") for name in names]
    settings = RouterSettings(latent_size=LATENT_SIZE, combine=combine, transport="tcp", spin_s=0)
    with serving([worker for worker, _ in made]):
        router = make_router([info for _, info in made], placement, settings)
        run(router.lane(step=0, lane=0), 1, 9, seed=0)
        counters = router.counters
        router.close()
    assert sum(worker.stats.bytes_in for worker, _ in made) == counters.bytes_out
    assert sum(worker.stats.bytes_out for worker, _ in made) == counters.bytes_in


def test_a_full_width_hidden_cannot_be_dispatched(folder: Path) -> None:
    hidden = torch.zeros(4, 2 * LATENT_SIZE)
    _, ids_TK, weights_TK = choices(4, 3, seed=0)
    with (
        cluster(folder, "local", 1, experts=RandomExperts()) as [router],
        pytest.raises(Exception, match=rf"\(4, 32\), expected \[tokens, {LATENT_SIZE}\]"),
    ):
        router.lane(step=0, lane=0).begin(1, hidden, ids_TK, weights_TK)
