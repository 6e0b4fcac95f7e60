from __future__ import annotations

import os
import select
import socket
from pathlib import Path

import pytest

from router.transport import listener as listener_module
from router.transport.handshake import encode_hello
from tests.fakes.transport_rigs import SOCKET_RIGS, TransportRig, connect_pair
from tests.unit.router.transport.test_handshake import HELLO

SHM = SOCKET_RIGS[0]


def test_a_silent_peer_is_dropped_after_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "HELLO_TIMEOUT_S", -1.0)
    listener = SHM.listen(folder)
    with SHM.dial_raw(listener.address) as stranger:
        stranger.settimeout(10)
        assert listener.try_accept() is None  # takes the connection in
        assert listener.try_accept() is None  # and drops it
        assert stranger.recv(1) == b""
    listener.close()


def test_a_hello_without_memory_is_refused_by_shm(folder: Path) -> None:
    listener = SHM.listen(folder)
    with SHM.dial_raw(listener.address) as stranger:
        stranger.settimeout(10)
        stranger.sendall(encode_hello(HELLO))
        while select.select([listener], [], [], 0)[0]:
            assert listener.try_accept() is None
        assert stranger.recv(1) == b""
    listener.close()


def test_descriptors_that_are_no_memory_are_refused_and_closed(folder: Path) -> None:
    listener = SHM.listen(folder)
    read_end, write_end = os.pipe()
    with SHM.dial_raw(listener.address) as stranger:
        stranger.settimeout(10)
        socket.send_fds(stranger, [encode_hello(HELLO)], [write_end, write_end])
        os.close(write_end)
        while select.select([listener], [], [], 0)[0]:
            assert listener.try_accept() is None
        assert stranger.recv(1) == b""
    assert os.read(read_end, 1) == b""  # nobody holds the other end any more
    os.close(read_end)
    listener.close()


@pytest.mark.parametrize("rig", SOCKET_RIGS, ids=lambda rig: rig.kind)
def test_closing_a_listener_closes_the_connections_on_their_way(
    rig: TransportRig, folder: Path
) -> None:
    listener = rig.listen(folder)
    with rig.dial_raw(listener.address) as stranger:
        stranger.settimeout(10)
        assert listener.try_accept() is None
        listener.close()
        assert stranger.recv(1) == b""


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("rig", SOCKET_RIGS, ids=lambda rig: rig.kind)
def test_a_connection_leaves_no_descriptor_behind(rig: TransportRig, folder: Path) -> None:
    before = count_descriptors()
    listener = rig.listen(folder)
    for _ in range(3):
        near, far = connect_pair(rig, listener)
        near.close()
        far.close()
    listener.close()
    assert count_descriptors() == before
