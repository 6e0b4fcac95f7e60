"""One suite over all transports: what `router/transport/base.py` promises."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from configs.errors import FrameError, PeerClosedError, TransportTimeoutError
from configs.ids import WorkerId
from router.frames import HEADER_BYTES, encode_header
from router.transport.base import Frame, Link
from tests.fakes.frame_making import dispatch_header, pattern, sized_header
from tests.fakes.transport_rigs import (
    DEADLINE_S,
    RIGS,
    SHM_BYTES,
    SOCKET_RIGS,
    TransportRig,
    accept,
    connect_pair,
)

THIRD = SHM_BYTES // 16 * 5
Pair = tuple[Link, Link]
PIPE_BYTES = 16 << 20
"""More than any transport takes without a reader."""


@pytest.fixture(params=RIGS, ids=lambda rig: rig.kind)
def rig(request: pytest.FixtureRequest) -> TransportRig:
    return request.param


@pytest.fixture
def pair(rig: TransportRig, folder: Path) -> Iterator[Pair]:
    with rig.pair(folder) as links:
        yield links


def soon() -> float:
    return time.monotonic() + DEADLINE_S


def send(link: Link, num_bytes: int, *, step: int = 0) -> None:
    link.send(sized_header(num_bytes, step=step), [pattern(num_bytes, step)], deadline=soon())


def receive(link: Link, *, sender: Link | None = None) -> Frame:
    """Receive the next frame, pushing what `sender` has queued."""
    deadline = soon()
    while time.monotonic() < deadline:
        if sender is not None:
            sender.flush()
        frame = link.try_receive()
        if frame is not None:
            return frame
    raise TimeoutError("no frame came")


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    near, far = pair
    sizes = [4, 0, 40_000, 64, 0, 4096, 123_456]
    for step, size in enumerate(sizes):
        send(near, size, step=step)
    for step, size in enumerate(sizes):
        frame = receive(far, sender=near)
        assert frame.header == sized_header(size, step=step)
        assert np.array_equal(frame.payload, pattern(size, step))
        far.release(frame)


def test_both_directions_are_independent(pair: Pair) -> None:
    near, far = pair
    send(near, 400, step=1)
    send(far, 800, step=2)
    assert receive(near).header.step == 2
    assert receive(far).header.step == 1


def test_parts_are_joined_and_may_be_reused_on_return(pair: Pair) -> None:
    near, far = pair
    first, second = pattern(8, 1), pattern(4, 2)
    expected = np.concatenate([first, second])
    near.send(sized_header(12), [first, second], deadline=soon())
    first[:] = 0
    second[:] = 0
    assert np.array_equal(receive(far).payload, expected)


def test_a_payload_larger_than_any_buffer_arrives(pair: Pair) -> None:
    near, far = pair
    size = 20 * SHM_BYTES
    send(near, size)
    frame = receive(far, sender=near)
    assert np.array_equal(frame.payload, pattern(size))


def test_many_frames_in_flight_arrive_in_order(pair: Pair) -> None:
    near, far = pair
    for step in range(300):
        send(near, 12_000, step=step)
    for step in range(300):
        frame = receive(far, sender=near)
        assert frame.header.step == step
        assert np.array_equal(frame.payload, pattern(12_000, step))
        far.release(frame)


def test_unreleased_payloads_stay_intact_while_others_come(pair: Pair) -> None:
    near, far = pair
    held = []
    for step in range(40):
        send(near, 50_000, step=step)
        held.append(receive(far, sender=near))
    for step, frame in enumerate(held):
        assert np.array_equal(frame.payload, pattern(50_000, step))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_frames_are_released_in_any_order(pair: Pair, order: tuple[int, ...]) -> None:
    near, far = pair
    # Each round takes more than half of the shared memory: a buffer that is lost shows in the next.
    for _ in range(10):
        for step in range(3):
            send(near, THIRD, step=step)
        frames = [receive(far, sender=near) for _ in range(3)]
        for index in order:
            assert np.array_equal(frames[index].payload, pattern(THIRD, index))
            far.release(frames[index])


def test_sending_never_blocks_on_a_slow_reader(pair: Pair) -> None:
    near, far = pair
    num_frames = PIPE_BYTES // SHM_BYTES
    for step in range(num_frames):
        send(near, SHM_BYTES, step=step)
    assert near.unsent_bytes > 0
    for step in range(num_frames):
        frame = receive(far, sender=near)
        assert frame.header.step == step
        far.release(frame)
    assert near.unsent_bytes == 0


def test_two_sides_that_send_at_once_both_get_everything(pair: Pair) -> None:
    near, far = pair
    for step in range(20):
        send(near, SHM_BYTES, step=step)
        send(far, SHM_BYTES, step=step)
    for step in range(20):
        for link, other in ((near, far), (far, near)):
            frame = receive(link, sender=other)
            assert frame.header.step == step
            link.release(frame)


def test_a_reader_that_makes_no_room_before_the_deadline_is_an_error(pair: Pair) -> None:
    near, _ = pair
    with pytest.raises(TransportTimeoutError, match="expert-1 made no room"):
        near.send(sized_header(PIPE_BYTES), [pattern(PIPE_BYTES)], deadline=0.0)
    with pytest.raises(PeerClosedError):
        near.try_receive()


def test_parts_that_do_not_fit_the_header_are_refused_and_nothing_is_sent(pair: Pair) -> None:
    near, far = pair
    with pytest.raises(FrameError, match="has 8 payload bytes, its header states 12"):
        near.send(sized_header(12), [pattern(8)], deadline=soon())
    send(near, 4, step=9)
    assert receive(far).header.step == 9


def test_the_descriptor_is_readable_exactly_while_a_frame_waits(pair: Pair) -> None:
    near, far = pair
    poll = select.poll()
    poll.register(far.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    send(near, 40)
    send(near, 0)
    for _ in range(2):
        assert poll.poll(5000)
        assert far.try_receive() is not None
    assert poll.poll(0) == []
    assert far.try_receive() is None


def test_what_was_sent_before_closing_can_still_be_read(pair: Pair) -> None:
    near, far = pair
    send(near, 400, step=1)
    send(near, 0, step=2)
    near.close()
    assert receive(far).header.step == 1
    assert receive(far).header.step == 2
    with pytest.raises(PeerClosedError, match="attention-1"):
        receive(far)


def test_closing_twice_is_fine_and_a_closed_link_says_so(pair: Pair) -> None:
    near, _ = pair
    near.close()
    near.close()
    with pytest.raises(PeerClosedError):
        near.send(sized_header(0), [], deadline=soon())
    with pytest.raises(PeerClosedError):
        near.try_receive()


def test_sending_to_a_peer_that_left_is_an_error(pair: Pair) -> None:
    near, far = pair
    far.close()
    with pytest.raises(PeerClosedError, match="expert-1"):
        send_repeatedly(near)


def send_repeatedly(link: Link) -> None:
    # The kernel may take a few frames before it knows that the other side is gone.
    for step in range(100):
        send(link, 4096, step=step)


def test_frames_are_released_after_closing_without_harm(pair: Pair) -> None:
    near, far = pair
    send(near, 4000)
    frame = receive(far)
    far.close()
    far.release(frame)
    assert np.array_equal(frame.payload, pattern(4000))


@pytest.mark.parametrize(
    "data",
    [b"\xff" * HEADER_BYTES, encode_header(dispatch_header())[:6] + bytes(HEADER_BYTES - 6)],
    ids=["noise", "unknown-kind"],
)
def test_bytes_that_are_no_frame_close_the_link(rig: TransportRig, pair: Pair, data: bytes) -> None:
    near, far = pair
    rig.write_raw(near, data)
    with pytest.raises(FrameError):
        receive(far)
    with pytest.raises(PeerClosedError):
        far.try_receive()


def test_a_header_that_arrives_in_pieces_waits_for_the_rest(rig: TransportRig, pair: Pair) -> None:
    near, far = pair
    data = encode_header(sized_header(0, step=5))
    rig.write_raw(near, data[:10])
    assert far.try_receive() is None
    rig.write_raw(near, data[10:])
    assert receive(far).header.step == 5


def test_a_peer_that_leaves_within_a_header_is_an_error(rig: TransportRig, pair: Pair) -> None:
    near, far = pair
    rig.write_raw(near, encode_header(sized_header(0))[:10])
    near.close()
    with pytest.raises(PeerClosedError):
        receive(far)


def test_both_sides_know_peer_and_generation(rig: TransportRig, folder: Path) -> None:
    with rig.pair(folder, worker=WorkerId("attention-7"), generation=42) as (near, far):
        assert (near.peer, far.peer) == ("expert-1", "attention-7")
        assert (near.generation, far.generation) == (42, 42)


def test_several_peers_have_links_of_their_own(rig: TransportRig, folder: Path) -> None:
    listener = rig.listen(folder)
    pairs = [
        connect_pair(rig, listener, worker=WorkerId(f"attention-{i}"), generation=i + 1)
        for i in range(3)
    ]
    for i, (near, _) in enumerate(pairs):
        send(near, 400, step=i)
    for i, (_, far) in enumerate(pairs):
        assert far.peer == f"attention-{i}"
        assert receive(far).header.step == i
    listener.close()
    for links in pairs:
        for link in links:
            link.close()


def test_two_listeners_do_not_meet(rig: TransportRig, folder: Path) -> None:
    listeners = [rig.listen(folder, WorkerId(f"expert-{i}")) for i in range(2)]
    links = [connect_pair(rig, listener) for listener in listeners]
    assert [near.peer for near, _ in links] == ["expert-0", "expert-1"]
    for listener in listeners:
        assert listener.try_accept() is None
        listener.close()
    for near, far in links:
        near.close()
        far.close()


def test_a_closed_listener_is_not_reached_and_leaves_no_file(
    rig: TransportRig, folder: Path
) -> None:
    listener = rig.listen(folder)
    address = listener.address
    listener.close()
    listener.close()
    with pytest.raises(PeerClosedError):
        rig.dial(address)
    assert list(folder.iterdir()) == []


def test_links_outlive_their_listener(rig: TransportRig, folder: Path) -> None:
    with rig.pair(folder) as (near, far):  # the rig has closed the listener by now
        send(near, 400, step=3)
        assert receive(far).header.step == 3


socket_kinds = pytest.mark.parametrize("rig", SOCKET_RIGS, ids=lambda rig: rig.kind, indirect=True)


@socket_kinds
@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9], ids=["silent", "noise"])
def test_a_stranger_at_the_door_does_not_keep_others_out(
    rig: TransportRig, folder: Path, data: bytes
) -> None:
    listener = rig.listen(folder)
    with rig.dial_raw(listener.address) as stranger:
        stranger.sendall(data)
        near, far = connect_pair(rig, listener)
        send(near, 400, step=1)
        assert receive(far).header.step == 1
    near.close()
    far.close()
    listener.close()


@socket_kinds
def test_a_listener_that_never_accepts_is_given_up_at_the_deadline(
    rig: TransportRig, folder: Path
) -> None:
    listener = rig.listen(folder)
    with pytest.raises(TransportTimeoutError, match="passed its deadline"):
        rig.dial(listener.address, timeout_s=0.01)
    listener.close()


def echo_once(rig: TransportRig, address: str) -> None:
    link = rig.dial(address)
    frame = receive(link)
    link.send(frame.header, [frame.payload], deadline=soon())
    receive_until_closed(link)


def receive_until_closed(link: Link) -> None:
    try:
        while True:
            link.flush()
            link.try_receive()
    except PeerClosedError:
        link.close()


def send_half_and_wait(rig: TransportRig, address: str, pipe: Connection) -> None:
    link = rig.dial(address)
    send(link, 4)
    send(link, PIPE_BYTES, step=1)
    pipe.send("sent")
    pipe.recv()


@socket_kinds
@pytest.mark.parametrize("size", [40_000, 4 * SHM_BYTES], ids=["small", "large"])
def test_frames_cross_processes(rig: TransportRig, folder: Path, size: int) -> None:
    listener = rig.listen(folder)
    child = multiprocessing.get_context("spawn").Process(
        target=echo_once, args=(rig, listener.address)
    )
    child.start()
    link = accept(listener)
    send(link, size, step=3)
    frame = receive(link, sender=link)
    assert np.array_equal(frame.payload, pattern(size, 3))
    link.close()
    child.join()
    assert child.exitcode == 0
    listener.close()


@socket_kinds
def test_a_peer_killed_within_a_frame_is_an_error_after_its_whole_frames(
    rig: TransportRig, folder: Path
) -> None:
    listener = rig.listen(folder)
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    child = context.Process(target=send_half_and_wait, args=(rig, listener.address, far_end))
    child.start()
    link = accept(listener)
    assert pipe.recv() == "sent"
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert receive(link).header.step == 0
    with pytest.raises(PeerClosedError, match="attention-1"):
        receive(link)
    listener.close()
