from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from router.transport.wait import Waiter


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


@pytest.mark.parametrize("spin_s", [0.0, 10.0], ids=["sleeps", "spins"])
def test_what_is_ready_is_told(sockets: tuple[socket.socket, socket.socket], spin_s: float) -> None:
    near, far = sockets
    waiter = Waiter(spin_s=spin_s)
    waiter.add(far.fileno())
    threading.Timer(0.01, near.send, [b"x"]).start()
    assert waiter.wait(time.monotonic() + 20) == [(far.fileno(), select.POLLIN)]


def test_a_passed_deadline_looks_once(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    waiter = Waiter(spin_s=10.0)
    waiter.add(far.fileno())
    assert waiter.wait(0.0) == []
    near.send(b"x")
    assert waiter.wait(0.0) == [(far.fileno(), select.POLLIN)]


def test_room_to_write_is_told_only_when_asked_for(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = sockets
    waiter = Waiter(spin_s=0.0)
    waiter.add(near.fileno())
    assert waiter.wait(0.0) == []
    waiter.watch(near.fileno(), for_reading=True, for_writing=True)
    assert waiter.wait(0.0) == [(near.fileno(), select.POLLOUT)]
    waiter.watch(near.fileno(), for_reading=True, for_writing=False)
    assert waiter.wait(0.0) == []


def test_a_removed_descriptor_is_not_told(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    waiter = Waiter(spin_s=0.0)
    waiter.add(far.fileno())
    waiter.remove(far.fileno())
    near.send(b"x")
    assert waiter.wait(0.0) == []
