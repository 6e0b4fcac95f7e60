from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from configs.errors import (
    PlacementError,
    RoutingError,
    TransportError,
    TransportTimeoutError,
    WorkerError,
)
from configs.ids import Epoch, Generation, WorkerId
from configs.numerics import FloatType
from router.frames import HEADER_BYTES, FrameHeader, FrameKind, combine_payload_bytes
from router.latent_router import LatentRouter
from router.membership import ExpertWorkerInfo, Membership
from router.placement import LayerPlacement, Placement
from router.plan import ROW
from router.settings import RouterSettings
from router.ticket import RouterTicket
from router.transport.base import Frame, Link, Listener
from router.transport.local import listen_local

LATENT = 4
EXPERTS = [WorkerId("expert-0"), WorkerId("expert-1")]
Z = torch.arange(8, dtype=torch.float32).reshape(2, LATENT)
IDS = torch.tensor([[0, 1], [2, 0]])  # expert 1 lives on expert-1, the others on expert-0
WEIGHTS = torch.full((2, 2), 0.5)
PLACEMENT = Placement(
    layers=tuple(
        LayerPlacement(
            layer=layer, epoch=Epoch(2), holders=((EXPERTS[0],), (EXPERTS[1],), (EXPERTS[0],))
        )
        for layer in (3, 4)
    )
)


@dataclass
class Rig:
    """A router and the far ends of its links, played by the test."""

    router: LatentRouter
    listeners: list[Listener]
    links: list[Link]

    def begin(self, *, layer: int = 3, step: int = 7, lane: int = 0) -> RouterTicket:
        return self.router.begin(layer, Z, IDS, WEIGHTS, step=step, lane=lane)

    def take(self, index: int) -> Frame:
        frame = self.links[index].try_receive()
        assert frame is not None
        return frame

    def answer(self, index: int, frame: Frame, **changes: object) -> None:
        """Echo: every pair's answer is its latent."""
        header = answer_header(frame.header, **changes)
        rows = latents(frame)[pair_rows(frame)]
        payload = rows.tobytes() if header.kind is FrameKind.COMBINE else b"CODE: broken"
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8).numpy()
        self.links[index].send(header, [data[: header.payload_bytes]], deadline=far_off())


def far_off() -> float:
    return time.monotonic() + 20


def latents(frame: Frame):
    num_bytes = frame.header.num_tokens * LATENT * 4
    return frame.payload[:num_bytes].view("f4").reshape(-1, LATENT)


def pair_rows(frame: Frame):
    pairs = frame.payload[frame.header.num_tokens * LATENT * 4 :].view("u4")
    return pairs.reshape(3, -1)[ROW]


def answer_header(header: FrameHeader, **changes: object) -> FrameHeader:
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    fields.update({"kind": FrameKind.COMBINE, **changes})
    if fields["kind"] is FrameKind.FAILURE:
        fields["payload_bytes"] = len("CODE: broken")
    else:
        names = ("num_tokens", "num_pairs", "latent_size", "wire_dtype", "combine")
        fields["payload_bytes"] = combine_payload_bytes(**{name: fields[name] for name in names})
    return FrameHeader(**fields)


def open_rig(*, dispatch_timeout_s: float = 20.0) -> Rig:
    listeners = [listen_local(worker=worker) for worker in EXPERTS]
    router = LatentRouter(
        worker=WorkerId("attention-0"),
        settings=RouterSettings(
            latent_size=LATENT,
            transport="local",
            spin_s=0.0,
            dispatch_timeout_s=dispatch_timeout_s,
        ),
    )
    rig = Rig(router, list(listeners), [])
    connect(rig)
    router.set_placement(PLACEMENT)
    return rig


def members(rig: Rig, indices: tuple[int, ...] = (0, 1), generation: int = 1) -> Membership:
    return Membership(
        Generation(generation),
        tuple(ExpertWorkerInfo(EXPERTS[i], (rig.listeners[i].address,), "") for i in indices),
    )


def connect(rig: Rig) -> None:
    rig.router.connect(members(rig))
    rig.links = [link for listener in rig.listeners if (link := listener.try_accept())]


def close_rig(rig: Rig) -> None:
    rig.router.close()
    for item in [*rig.listeners, *rig.links]:
        item.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = open_rig()
    yield made
    close_rig(made)


def test_a_frame_names_its_call_generation_and_epoch(rig: Rig) -> None:
    rig.begin(layer=4, step=9, lane=2)
    header = rig.take(0).header
    assert header.call == (9, 4, 2, 0)
    assert (header.generation, header.epoch) == (1, 2)
    assert (header.num_tokens, header.num_pairs) == (2, 3)


def test_answers_may_come_in_any_order(rig: Rig) -> None:
    first, second = rig.begin(lane=0), rig.begin(lane=1)
    frames = [(i, rig.take(i)) for i in (0, 1, 0, 1)]
    for index, frame in reversed(frames):
        assert not (first.is_ready() and second.is_ready())
        rig.answer(index, frame)
    assert second.is_ready()
    assert torch.equal(rig.router.finish(second), Z)
    assert torch.equal(rig.router.finish(first), Z)


def test_the_arguments_may_be_reused_after_begin(rig: Rig) -> None:
    z = Z.clone()
    ticket = rig.router.begin(3, z, IDS, WEIGHTS, step=0, lane=0)
    z.zero_()
    for index in (0, 1):
        rig.answer(index, rig.take(index))
    assert torch.equal(rig.router.finish(ticket), Z)


def test_a_worker_without_tokens_gets_no_frame(rig: Rig) -> None:
    rig.router.begin(3, Z, torch.tensor([[0], [2]]), WEIGHTS[:, :1], step=0, lane=0)
    assert rig.take(0).header.num_pairs == 2
    assert rig.links[1].try_receive() is None


def test_no_tokens_need_no_frames(rig: Rig) -> None:
    ticket = rig.router.begin(3, Z[:0], IDS[:0], WEIGHTS[:0], step=0, lane=0)
    assert ticket.is_ready()
    assert rig.router.finish(ticket).shape == (0, LATENT)
    assert rig.router.counters.frames_out == 0


def test_a_ticket_without_answer_is_not_ready(rig: Rig) -> None:
    assert not rig.begin().is_ready()


def test_waiting_ends_with_the_first_ready_ticket(rig: Rig) -> None:
    first, second = rig.begin(lane=0), rig.begin(lane=1)
    for index in (0, 1):
        rig.take(index)
        rig.answer(index, rig.take(index))
    rig.router.wait_any([first, second], deadline=far_off())
    assert second.is_ready()
    assert not first.is_ready()


def test_a_passed_deadline_of_the_wait_names_workers_layer_and_step(rig: Rig) -> None:
    ticket = rig.begin()
    rig.answer(0, rig.take(0))
    with pytest.raises(TransportTimeoutError, match=r"from expert-1 for layer 3, step 7"):
        rig.router.wait_any([ticket], deadline=time.monotonic() + 0.01)


def test_a_dispatch_without_answer_fails_at_its_own_deadline() -> None:
    rig = open_rig(dispatch_timeout_s=0.01)
    ticket = rig.begin()
    with pytest.raises(TransportTimeoutError, match="expert-0, expert-1 for layer 3, step 7"):
        rig.router.finish(ticket)
    close_rig(rig)


def test_a_failure_is_told_with_its_text(rig: Rig) -> None:
    ticket = rig.begin()
    rig.answer(0, rig.take(0), kind=FrameKind.FAILURE)
    assert ticket.is_ready()
    with pytest.raises(WorkerError, match="expert-0 failed at layer 3, step 7: CODE: broken"):
        rig.router.finish(ticket)


def test_a_lost_worker_fails_the_dispatches_that_wait_for_it(rig: Rig) -> None:
    waiting, settled = rig.begin(lane=0), rig.begin(lane=1)
    first, second = rig.take(1), rig.take(1)
    del first
    rig.answer(1, second)
    for frame in (rig.take(0), rig.take(0)):
        rig.answer(0, frame)
    rig.links[1].close()
    assert torch.equal(rig.router.finish(settled), Z)
    with pytest.raises(WorkerError, match="expert-1 is gone at layer 3, step 7"):
        rig.router.finish(waiting)


def test_a_dispatch_to_a_lost_worker_fails_at_once_and_others_go_on(rig: Rig) -> None:
    rig.links[1].close()
    with pytest.raises(WorkerError, match="expert-1 is gone at layer 3, step 7"):
        rig.begin()
    with pytest.raises(WorkerError, match="no connected expert worker holds expert 1"):
        rig.begin()
    assert rig.take(0).header.step == 7  # sent before the other one was found gone
    ticket = rig.router.begin(3, Z, torch.tensor([[0], [2]]), WEIGHTS[:, :1] * 2, step=9, lane=0)
    rig.answer(0, rig.take(0))
    assert torch.equal(rig.router.finish(ticket), Z)


def test_late_answers_of_an_abandoned_step_are_ignored(rig: Rig) -> None:
    rig.begin()
    late = [rig.take(0), rig.take(1)]
    rig.router.abandon_step()
    again = rig.begin()
    for index, frame in enumerate(late):
        rig.answer(index, frame)
    assert not again.is_ready()
    frames = [rig.take(0), rig.take(1)]
    assert frames[0].header.attempt == late[0].header.attempt + 1
    for index, frame in enumerate(frames):
        rig.answer(index, frame)
    assert torch.equal(rig.router.finish(again), Z)
    assert rig.router.counters.late_frames_in == 2


def test_an_abandoned_ticket_cannot_be_finished(rig: Rig) -> None:
    ticket = rig.begin()
    rig.router.abandon_step()
    with pytest.raises(RoutingError, match="given up"):
        rig.router.finish(ticket)


def test_a_ticket_is_finished_once(rig: Rig) -> None:
    ticket = rig.begin()
    for index in (0, 1):
        rig.answer(index, rig.take(index))
    rig.router.finish(ticket)
    with pytest.raises(RoutingError, match="finished or given up"):
        rig.router.finish(ticket)


def test_a_call_is_in_flight_once(rig: Rig) -> None:
    rig.begin()
    with pytest.raises(RoutingError, match="already in flight"):
        rig.begin()


@pytest.mark.parametrize(
    "changes",
    [{"num_pairs": 2}, {"num_tokens": 1}, {"wire_dtype": FloatType.BFLOAT16}],
    ids=["pairs", "tokens", "dtype"],
)
def test_an_answer_that_does_not_fit_the_dispatch_fails_it(
    rig: Rig, changes: dict[str, object]
) -> None:
    ticket = rig.begin()
    rig.answer(0, rig.take(0), **changes)
    with pytest.raises(RoutingError, match="expert-0 answered layer 3, step 7 with"):
        rig.router.finish(ticket)


def test_an_answer_of_another_generation_is_late(rig: Rig) -> None:
    ticket = rig.begin()
    rig.answer(0, rig.take(0), generation=Generation(9))
    assert not ticket.is_ready()
    assert rig.router.counters.late_frames_in == 1


def test_a_frame_that_is_no_answer_is_a_failure_of_its_worker(rig: Rig) -> None:
    ticket = rig.begin()
    frame = rig.take(0)
    rig.links[0].send(frame.header, [frame.payload], deadline=far_off())
    with pytest.raises(WorkerError, match="expert-0 answered layer 3, step 7 with a dispatch"):
        rig.router.finish(ticket)


def test_bytes_that_are_no_frame_cost_the_link(rig: Rig) -> None:
    ticket = rig.begin()
    os.write(rig.links[0].fileno(), b"\xff" * HEADER_BYTES)
    with pytest.raises(WorkerError, match="expert-0 is gone at layer 3, step 7: frame magic"):
        rig.router.finish(ticket)
    assert rig.router.connected_workers == ("expert-1",)


def test_a_layer_without_placement_is_named(rig: Rig) -> None:
    with pytest.raises(PlacementError, match=r"layer 5 has no placement; placed: \[3, 4\]"):
        rig.begin(layer=5)


def test_more_latents_than_choices_are_refused(rig: Rig) -> None:
    with pytest.raises(RoutingError, match="2 latents but choices for 1"):
        rig.router.begin(3, Z, IDS[:1], WEIGHTS[:1], step=0, lane=0)


def test_members_that_stay_keep_their_link_and_others_lose_it(rig: Rig) -> None:
    rig.router.connect(members(rig, indices=(0,), generation=2))
    assert rig.router.connected_workers == ("expert-0",)
    assert rig.listeners[0].try_accept() is None
    rig.router.begin(3, Z, torch.tensor([[0], [2]]), WEIGHTS[:, :1], step=0, lane=0)
    assert rig.take(0).header.generation == 2
    with pytest.raises(WorkerError, match="no connected expert worker holds expert 1"):
        rig.begin()


def test_a_broken_link_is_made_anew_by_connecting_again(rig: Rig) -> None:
    rig.links[1].close()
    rig.router.connect(members(rig, generation=2))
    link = rig.listeners[1].try_accept()
    assert link is not None
    rig.links[1] = link
    ticket = rig.begin()
    for index in (0, 1):
        rig.answer(index, rig.take(index))
    assert torch.equal(rig.router.finish(ticket), Z)


def test_an_older_membership_is_refused(rig: Rig) -> None:
    rig.router.connect(members(rig, generation=5))
    with pytest.raises(RoutingError, match="generation 4 is older than 5"):
        rig.router.connect(members(rig, generation=4))


def test_a_worker_that_is_not_there_is_an_error_and_the_others_are_connected(rig: Rig) -> None:
    rig.router.connect(members(rig, indices=(0,), generation=2))
    rig.listeners[1].close()
    with pytest.raises(TransportError, match="local:expert-1"):
        rig.router.connect(members(rig, generation=3))
    assert rig.router.connected_workers == ("expert-0",)


def test_a_new_placement_holds_from_the_next_dispatch(rig: Rig) -> None:
    everything = tuple((EXPERTS[1],) for _ in range(3))
    rig.router.set_placement(
        Placement(layers=(LayerPlacement(layer=3, epoch=Epoch(3), holders=everything),))
    )
    rig.begin()
    header = rig.take(1).header
    assert (header.epoch, header.num_pairs) == (3, 4)


def test_closing_twice_is_fine(rig: Rig) -> None:
    rig.begin()
    rig.router.close()
    rig.router.close()
    assert rig.router.connected_workers == ()
