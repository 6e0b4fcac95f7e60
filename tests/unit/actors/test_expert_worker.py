from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.expert_merge import PairBatch
from actors.expert_worker import ExpertWorker, ExpertWorkerSettings
from configs.errors import WorkerError
from configs.ids import Epoch, Generation, WorkerId
from configs.numerics import Combine, FloatType
from router.frames import HEADER_BYTES, FrameHeader, FrameKind
from router.latent_router import LatentRouter
from router.membership import ExpertWorkerInfo, Membership
from router.settings import RouterSettings
from router.staging import TORCH_TYPES
from router.transport.base import Frame, Hello, Link
from router.transport.connect import TransportKind, connect
from tests.fakes.expert_rig import (
    LATENT_SIZE,
    RandomExperts,
    accepting,
    choices,
    make_router,
    make_worker,
    place,
    pump,
    worker_names,
)
from tests.fakes.frame_making import dispatch_header, pair_bytes, pattern

NAME = WorkerId("expert-0")
NUM_LATENT = 4


class ManualCompute:
    """Answers every pair with its latent plus its expert id, and remembers its batches."""

    latent_size = NUM_LATENT

    def __init__(self) -> None:
        self.batches: list[PairBatch] = []
        self.error: Exception | None = None

    def check(self, layer: int, epoch: Epoch, experts_P: np.ndarray) -> None:
        if layer == 13:
            raise WorkerError("layer 13 is unlucky")

    def run(self, batch: PairBatch) -> tuple[torch.Tensor, int]:
        self.batches.append(batch)
        if self.error is not None:
            raise self.error
        z_PL = batch.gather(np.arange(batch.rows_P.size)).float()
        experts = torch.from_numpy(batch.experts_P.astype(np.float32))
        return z_PL + experts[:, None], len(set(batch.experts_P.tolist()))


@dataclass
class Rig:
    worker: ExpertWorker
    info: ExpertWorkerInfo
    compute: ManualCompute
    links: list[Link]

    def dial(self, name: str = "attention-0", generation: int = 1) -> Link:
        with accepting([self.worker]):
            link = connect(
                self.info.addresses[0],
                Hello(WorkerId(name), Generation(generation)),
                deadline=time.monotonic() + 20,
                shm_bytes=1 << 16,
            )
        self.links.append(link)
        while self.worker.step():
            pass
        return link

    def step_all(self) -> None:
        while self.worker.step():
            pass


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lm") as name:
        yield Path(name)


def open_rig(
    folder: Path,
    *,
    kind: TransportKind = "local",
    settings: ExpertWorkerSettings | None = None,
) -> Rig:
    compute = ManualCompute()
    worker = ExpertWorker(
        worker=NAME,
        compute=compute,
        settings=ExpertWorkerSettings(spin_s=0.0) if settings is None else settings,
    )
    info = worker.listen(directory=folder, host="127.0.0.1", transports=[kind])
    return Rig(worker, info, compute, [])


def close_rig(rig: Rig) -> None:
    rig.worker.close()
    for link in rig.links:
        link.close()


@pytest.fixture
def rig(folder: Path) -> Iterator[Rig]:
    made = open_rig(folder)
    yield made
    close_rig(made)


def send(
    link: Link,
    *,
    rows: list[int] | None = None,
    experts: list[int] | None = None,
    latent_size: int = NUM_LATENT,
    wire_dtype: FloatType = FloatType.FLOAT32,
    **header: object,
) -> FrameHeader:
    rows = [0, 1] if rows is None else rows
    experts = [3, 5] if experts is None else experts
    made = dispatch_header(
        num_tokens=2,
        num_pairs=len(rows),
        latent_size=latent_size,
        wire_dtype=wire_dtype,
        **header,  # type: ignore[arg-type]
    )
    latents = torch.arange(2 * latent_size).view(2, -1).to(TORCH_TYPES[wire_dtype])
    payload = [
        latents.view(torch.uint8).numpy().reshape(-1),
        pair_bytes(rows, experts, [1.0] * len(rows)),
    ]
    link.send(made, payload, deadline=time.monotonic() + 20)
    return made


def receive(link: Link) -> Frame:
    frame = link.try_receive()
    assert frame is not None
    return frame


def values(frame: Frame) -> list[list[float]]:
    dtype = TORCH_TYPES[frame.header.wire_dtype]
    rows = torch.from_numpy(frame.payload).view(dtype).view(-1, NUM_LATENT)
    return rows.float().tolist()


def failure(frame: Frame) -> str:
    assert frame.header.kind is FrameKind.FAILURE
    return frame.payload.tobytes().decode()


def test_a_dispatch_is_answered_pair_by_pair(rig: Rig) -> None:
    link = rig.dial()
    header = send(link, rows=[1, 0, 1], experts=[1, 2, 3])
    rig.step_all()
    frame = receive(link)
    assert (frame.header.kind, frame.header.call) == (FrameKind.COMBINE, header.call)
    assert values(frame) == [[5, 6, 7, 8], [2, 3, 4, 5], [7, 8, 9, 10]]


def test_a_presummed_answer_has_a_row_per_token(rig: Rig) -> None:
    link = rig.dial()
    send(link, rows=[0, 1, 1], experts=[1, 1, 3], combine=Combine.PRESUM)
    rig.step_all()
    assert values(receive(link)) == [[1, 2, 3, 4], [12, 14, 16, 18]]


def test_frames_of_a_layer_that_wait_are_merged_across_peers(rig: Rig) -> None:
    links = [rig.dial(f"attention-{i}") for i in range(3)]
    for step, link in enumerate(links):
        send(link, step=step, experts=[7, 7])
    rig.worker.step()
    assert len(rig.compute.batches) == 1
    for step, link in enumerate(links):
        frame = receive(link)
        assert frame.header.step == step
        assert values(frame) == [[7, 8, 9, 10], [11, 12, 13, 14]]
    stats = rig.worker.stats
    assert (stats.frames, stats.merged_ffns, stats.pairs, stats.expert_weight_reads) == (3, 1, 6, 1)
    assert stats.pairs_per_expert_weight_read == 6.0


def test_layers_are_served_in_the_order_of_their_first_frame(rig: Rig) -> None:
    link = rig.dial()
    other = rig.dial("attention-1")
    send(link, layer=5)
    rig.worker.step()
    for layer in (8, 2, 8):
        send(link, layer=layer, lane=layer)
    send(other, layer=2)
    rig.step_all()
    # A step takes one frame of each link: 8 and 2, then 2 (served with the one before), then 8.
    assert [batch.layer for batch in rig.compute.batches] == [5, 8, 2, 8]


def test_frames_of_different_wire_types_are_not_merged(rig: Rig) -> None:
    first, second = rig.dial("attention-0"), rig.dial("attention-1")
    send(first)
    send(second, wire_dtype=FloatType.BFLOAT16)
    rig.step_all()
    assert len(rig.compute.batches) == 2
    assert values(receive(first)) == values(receive(second))


def test_a_window_waits_for_the_frames_of_others(folder: Path) -> None:
    rig = open_rig(folder, settings=ExpertWorkerSettings(merge_window_s=0.05, spin_s=0.0))
    first, second = rig.dial("attention-0"), rig.dial("attention-1")
    send(first)
    while not rig.worker.step():
        pass
    assert rig.compute.batches == []
    send(second)
    while not rig.compute.batches:
        rig.worker.step(wait_s=1.0)
    assert [batch.rows_P.size for batch in rig.compute.batches] == [4]
    close_rig(rig)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 13}, "WORKER_FAILED: layer 13 is unlucky"),
        ({"latent_size": 8}, "computes latents of 4 values, the frame has 8"),
        ({"rows": [0, 2]}, "names row 2, the frame has 2 rows"),
        ({"generation": 4}, "is in generation 5 with attention-0, the frame is of generation 4"),
    ],
    ids=["layer", "latent", "row", "generation"],
)
def test_a_bad_frame_is_answered_with_the_reason_and_the_worker_goes_on(
    rig: Rig, options: dict, message: str
) -> None:
    link = rig.dial(generation=5)
    header = send(link, **{"generation": 5, **options})
    rig.step_all()
    frame = receive(link)
    assert message in failure(frame)
    assert frame.header.call == header.call
    send(link, generation=5)
    rig.step_all()
    assert receive(link).header.kind is FrameKind.COMBINE
    assert rig.worker.stats.failures == 1


def test_a_frame_that_is_no_dispatch_is_answered_with_the_reason(rig: Rig) -> None:
    link = rig.dial()
    header = dispatch_header(num_pairs=1, latent_size=NUM_LATENT)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    fields.update(kind=FrameKind.COMBINE, payload_bytes=16)
    link.send(FrameHeader(**fields), [pattern(16)], deadline=time.monotonic() + 20)
    rig.step_all()
    assert "expert workers take dispatch frames" in failure(receive(link))


def test_a_generation_may_grow_on_a_link_but_not_shrink(rig: Rig) -> None:
    link = rig.dial(generation=1)
    for generation in (2, 1):
        send(link, generation=generation, step=generation)
    rig.step_all()
    answers = {frame.header.step: frame for frame in (receive(link), receive(link))}
    assert answers[2].header.kind is FrameKind.COMBINE
    assert "the frame is of generation 1" in failure(answers[1])


@pytest.mark.parametrize(
    "error", [WorkerError("out of luck"), RuntimeError("out of luck")], ids=["ours", "torch"]
)
def test_a_failed_computation_is_told_to_everybody_in_it(rig: Rig, error: Exception) -> None:
    links = [rig.dial(f"attention-{i}") for i in range(2)]
    rig.compute.error = error
    for link in links:
        send(link)
    rig.step_all()
    assert [failure(receive(link)) for link in links] == ["WORKER_FAILED: out of luck"] * 2
    rig.compute.error = None
    send(links[0], step=1)
    rig.step_all()
    assert receive(links[0]).header.kind is FrameKind.COMBINE


def test_garbage_on_one_link_does_not_disturb_another(rig: Rig) -> None:
    bad, good = rig.dial("attention-0"), rig.dial("attention-1")
    bad._sock.send(b"\xff" * HEADER_BYTES)
    send(good)
    rig.step_all()
    assert receive(good).header.kind is FrameKind.COMBINE
    assert rig.worker.stats.num_peers == 1


def test_a_peer_that_leaves_with_a_frame_waiting_does_not_disturb_others(rig: Rig) -> None:
    leaving, staying = rig.dial("attention-0"), rig.dial("attention-1")
    send(leaving)
    send(staying)
    leaving.close()
    rig.step_all()
    assert receive(staying).header.kind is FrameKind.COMBINE
    assert rig.worker.stats.num_peers == 1


def test_a_peer_that_does_not_take_its_answers_is_dropped(folder: Path) -> None:
    rig = open_rig(folder, settings=ExpertWorkerSettings(spin_s=0.0, send_timeout_s=0.0))
    slow, other = rig.dial("attention-0"), rig.dial("attention-1")
    num_pairs = 400_000
    send(slow, rows=[0] * num_pairs, experts=[1] * num_pairs)
    deadline = time.monotonic() + 30
    while rig.worker.stats.num_peers == 2:
        slow.flush()
        rig.worker.step()
        assert time.monotonic() < deadline
    send(other)
    rig.step_all()
    assert receive(other).header.kind is FrameKind.COMBINE
    close_rig(rig)


def test_a_slow_reader_gets_everything_in_the_end(rig: Rig) -> None:
    link = rig.dial()
    num_pairs = 400_000
    send(link, rows=[0] * num_pairs, experts=[1] * num_pairs)
    frame = None
    deadline = time.monotonic() + 30
    while frame is None:
        link.flush()
        rig.worker.step()
        frame = link.try_receive()
        assert time.monotonic() < deadline
    assert frame.header.num_pairs == num_pairs


def test_serving_ends_when_it_is_told_to(rig: Rig) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=rig.worker.serve, args=(stop,))
    thread.start()
    stop.set()
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["local", "shm", "tcp"])
def test_closing_leaves_no_file_and_ends_the_links(folder: Path, kind: TransportKind) -> None:
    rig = open_rig(folder, kind=kind)
    link = rig.dial()
    rig.worker.close()
    rig.worker.close()
    assert list(folder.iterdir()) == []
    with pytest.raises(Exception, match="expert-0 closed the connection"):
        link.try_receive()
    close_rig(rig)


def test_all_transports_may_be_open_at_once(folder: Path) -> None:
    worker = ExpertWorker(
        worker=NAME, compute=ManualCompute(), settings=ExpertWorkerSettings(spin_s=0.0)
    )
    info = worker.listen(directory=folder, host="127.0.0.1", transports=["shm", "tcp", "local"])
    assert [address.split(":")[0] for address in info.addresses] == ["shm", "tcp", "local"]
    worker.close()


def test_an_answer_does_not_depend_on_what_it_was_merged_with(folder: Path) -> None:
    [name] = names = worker_names(1)
    placement = place(names)
    worker, info = make_worker(name, placement, RandomExperts(), folder)
    settings = RouterSettings(latent_size=LATENT_SIZE, transport="local", spin_s=0.0)
    routers = [make_router([info], placement, settings, name=f"attention-{i}") for i in range(4)]

    def run_together(chosen: list[LatentRouter], num_tokens: int) -> list[torch.Tensor]:
        tickets = [
            router.begin(1, *choices(num_tokens, 3, seed=i), step=num_tokens, lane=0)
            for i, router in enumerate(chosen)
        ]
        for ticket in tickets:
            pump(worker, ticket)
        return [router.finish(t) for router, t in zip(chosen, tickets, strict=True)]

    for num_tokens in (1, 5, 33):
        [alone] = run_together(routers[:1], num_tokens)
        before = worker.stats.merged_ffns
        merged, *_ = run_together(routers, num_tokens)
        assert worker.stats.merged_ffns == before + 1
        assert torch.equal(alone, merged)
        for router in routers:
            router.abandon_step()
    for router in routers:
        router.close()
    worker.close()


def test_a_router_whose_generation_grew_keeps_its_link(folder: Path) -> None:
    [name] = names = worker_names(1)
    placement = place(names)
    worker, info = make_worker(name, placement, RandomExperts(), folder)
    settings = RouterSettings(latent_size=LATENT_SIZE, transport="local", spin_s=0.0)
    router = make_router([info], placement, settings)
    router.connect(Membership(Generation(2), (info,)))
    ticket = router.begin(1, *choices(3, 2, seed=0), step=0, lane=0)
    pump(worker, ticket)
    assert router.finish(ticket).shape == (3, LATENT_SIZE)
    router.close()
    worker.close()
