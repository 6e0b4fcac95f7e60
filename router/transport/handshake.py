"""The first bytes of a connection: who dials, in which generation, and the listener's own name.

A hello is a fixed little-endian head and the worker's name; the answer is a message of the same
layout. Over a Unix socket the descriptors of the rings travel with the head. Knows no frames.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from configs.errors import FrameError, PeerClosedError, TransportError, TransportTimeoutError
from configs.ids import Generation, WorkerId
from router.transport.base import Hello

MAGIC = 0x484D464C  # "LFMH"
VERSION = 1
MAX_NAME_BYTES = 255
_HEAD = struct.Struct("<IHHQ")
HEAD_BYTES = _HEAD.size


def encode_hello(hello: Hello) -> bytes:
    """Return the bytes of a hello or of its answer.

    Raises:
        TransportError: The worker's name is empty or too long.
    """
    name = hello.worker.encode()
    if not 0 < len(name) <= MAX_NAME_BYTES:
        raise TransportError(
            f"worker name {hello.worker!r} has {len(name)} bytes, allowed are 1..{MAX_NAME_BYTES}"
        )
    return _HEAD.pack(MAGIC, VERSION, len(name), hello.generation) + name


class HelloReader:
    """Reads one hello from a non-blocking socket, piece by piece."""

    def __init__(self, sock: socket.socket, *, max_descriptors: int = 0) -> None:
        """Read from `sock`, which the caller keeps owning."""
        self._sock = sock
        self._max_descriptors = max_descriptors
        self._data = bytearray()
        self._name_bytes = 0
        self._generation = Generation(0)
        self.descriptors: list[int] = []
        """Descriptors that came along; whoever takes them closes them."""

    def try_read(self) -> Hello | None:
        """Return the hello once it is complete.

        Raises:
            PeerClosedError: The peer went away first.
            FrameError: What came is no hello.
            TimeoutError: The socket has a timeout, and it passed.
        """
        while True:
            wanted = HEAD_BYTES + self._name_bytes - len(self._data)
            try:
                data = self._receive(wanted)
            except BlockingIOError:
                return None
            except TimeoutError:
                raise
            except OSError as exc:
                raise PeerClosedError(f"a peer closed the connection in its hello: {exc}") from exc
            if not data:
                raise PeerClosedError("a peer closed the connection before its hello")
            self._data += data
            if len(self._data) == HEAD_BYTES:
                self._parse_head()
            elif len(self._data) == HEAD_BYTES + self._name_bytes:
                return self._parse_name()

    def close_descriptors(self) -> None:
        """Close whatever descriptors came along."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def _receive(self, num_bytes: int) -> bytes:
        if not self._max_descriptors:
            return self._sock.recv(num_bytes)
        data, descriptors, _, _ = socket.recv_fds(self._sock, num_bytes, self._max_descriptors)
        self.descriptors += descriptors
        return data

    def _parse_head(self) -> None:
        magic, version, name_bytes, generation = _HEAD.unpack(self._data)
        if magic != MAGIC:
            raise FrameError(f"hello magic is {magic:#010x}, expected {MAGIC:#010x}")
        if version != VERSION:
            raise FrameError(f"hello version is {version}, this build speaks {VERSION}")
        if not 0 < name_bytes <= MAX_NAME_BYTES:
            raise FrameError(
                f"hello names {name_bytes} name bytes, allowed are 1..{MAX_NAME_BYTES}"
            )
        self._name_bytes = name_bytes
        self._generation = Generation(generation)

    def _parse_name(self) -> Hello:
        try:
            name = self._data[HEAD_BYTES:].decode()
        except UnicodeDecodeError as exc:
            raise FrameError(f"hello holds a name that is no UTF-8: {exc}") from exc
        return Hello(worker=WorkerId(name), generation=self._generation)


def dial(
    sock: socket.socket,
    target: str | tuple[str, int],
    hello: Hello,
    *,
    deadline: float,
    descriptors: tuple[int, ...] = (),
) -> Hello:
    """Connect, say hello and return the listener's answer. Blocks until the deadline.

    The socket is non-blocking afterwards; on an error the caller closes it.

    Raises:
        PeerClosedError: Nobody listens there, or the listener refused.
        TransportTimeoutError: No answer before the deadline.
        FrameError: The listener answered with something else.
    """
    try:
        sock.settimeout(_remaining(deadline))
        sock.connect(target)
        if descriptors:
            socket.send_fds(sock, [encode_hello(hello)], list(descriptors))
        else:
            sock.sendall(encode_hello(hello))
        answer = _read_answer(sock, deadline)
    except TimeoutError as exc:
        raise TransportTimeoutError(
            f"connecting to {target} passed its deadline: no answer to the hello; "
            "is the worker still loading?"
        ) from exc
    except OSError as exc:
        raise PeerClosedError(f"cannot connect to {target}: {exc}") from exc
    sock.settimeout(0)
    return answer


def _read_answer(sock: socket.socket, deadline: float) -> Hello:
    reader = HelloReader(sock)
    while True:
        sock.settimeout(_remaining(deadline))
        answer = reader.try_read()
        if answer is not None:
            return answer


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
