from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

import pytest

from configs.errors import FrameError, PeerClosedError, TransportError
from configs.ids import Generation, WorkerId
from router.transport.base import Hello
from router.transport.handshake import HelloReader, encode_hello

HELLO = Hello(worker=WorkerId("attention-1"), generation=Generation(7))


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    far.settimeout(0)
    with near, far:
        yield near, far


def test_a_hello_is_read_byte_by_byte(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    reader = HelloReader(far)
    *rest, last = encode_hello(HELLO)
    for byte in rest:
        near.send(bytes([byte]))
        assert reader.try_read() is None
    near.send(bytes([last]))
    assert reader.try_read() == HELLO


def test_what_follows_a_hello_stays_unread(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    near.send(encode_hello(HELLO) + b"next")
    assert HelloReader(far).try_read() == HELLO
    assert far.recv(10) == b"next"


def test_descriptors_come_along(sockets: tuple[socket.socket, socket.socket]) -> None:
    near, far = sockets
    read_end, write_end = os.pipe()
    socket.send_fds(near, [encode_hello(HELLO)], [read_end, write_end])
    reader = HelloReader(far, max_descriptors=2)
    assert reader.try_read() == HELLO
    assert len(reader.descriptors) == 2
    os.write(reader.descriptors[1], b"x")
    assert os.read(read_end, 1) == b"x"
    reader.close_descriptors()
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "hello magic"),
        (struct.pack("<IHHQ", 0x484D464C, 9, 3, 1), "hello version is 9"),
        (struct.pack("<IHHQ", 0x484D464C, 1, 0, 1), "0 name bytes, allowed are 1..255"),
        (struct.pack("<IHHQ", 0x484D464C, 1, 256, 1), "256 name bytes"),
        (struct.pack("<IHHQ", 0x484D464C, 1, 2, 1) + b"\xff\xff", "no UTF-8"),
    ],
    ids=["http", "version", "no-name", "long-name", "no-utf8"],
)
def test_what_is_no_hello_is_refused(
    sockets: tuple[socket.socket, socket.socket], data: bytes, message: str
) -> None:
    near, far = sockets
    near.send(data)
    with pytest.raises(FrameError, match=message):
        HelloReader(far).try_read()


def test_a_peer_that_leaves_in_its_hello_is_an_error(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    near, far = sockets
    near.send(encode_hello(HELLO)[:5])
    near.close()
    with pytest.raises(PeerClosedError, match="before its hello"):
        HelloReader(far).try_read()


@pytest.mark.parametrize("name", ["", "x" * 256], ids=["empty", "long"])
def test_a_name_that_does_not_fit_is_refused_before_it_is_sent(name: str) -> None:
    with pytest.raises(TransportError, match=r"allowed are 1\.\.255"):
        encode_hello(Hello(worker=WorkerId(name), generation=Generation(1)))
