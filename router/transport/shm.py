"""Links within one host: headers over a Unix socket, payloads in shared memory.

The socket does what sockets do well: order, wake-ups, and the news of a dead peer. A payload that
finds no room in the ring, or is larger than it, follows its header on the socket instead: slower,
never stuck.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from configs.errors import FrameError, TransportError
from configs.ids import Generation, WorkerId
from router.frames import FrameHeader
from router.transport.base import Bytes, Frame, Hello, Link
from router.transport.handshake import dial
from router.transport.listener import SocketListener
from router.transport.ring import RingReader, RingWriter, create_ring_file
from router.transport.socket_files import MAX_SOCKET_PATH_BYTES, socket_path
from router.transport.stream import StreamLink

SCHEME = "shm:"
PLACE_RING = 1
NUM_RINGS = 2


class ShmLink(StreamLink):
    """One side of a shared-memory connection."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: WorkerId,
        generation: Generation,
        outgoing: RingWriter,
        incoming: RingReader,
    ) -> None:
        """Take over a connected Unix socket and both rings."""
        super().__init__(sock, peer=peer, generation=generation)
        self._outgoing = outgoing
        self._incoming = incoming

    def _place_payload(self, parts: Sequence[Bytes], num_bytes: int) -> tuple[int, int] | None:
        position = self._outgoing.try_write(parts, num_bytes)
        return None if position is None else (PLACE_RING, position)

    def _placed_frame(self, header: FrameHeader, place: int, position: int) -> Frame | None:
        if place != PLACE_RING:
            return super()._placed_frame(header, place, position)
        payload, number = self._incoming.receive(position, header.payload_bytes)
        return Frame(header, payload, -number)

    def release(self, frame: Frame) -> None:
        """Give back a frame's buffer; see `Link.release`."""
        if frame.token < 0:
            self._incoming.release(-frame.token)
        else:
            super().release(frame)

    def close(self) -> None:
        """End the link; see `Link.close`."""
        super().close()
        self._outgoing.close()
        self._incoming.close()


def listen_shm(*, worker: WorkerId, directory: Path) -> SocketListener:
    """Listen on a Unix socket in `directory`, which is made if it is missing.

    Raises:
        TransportError: The path is too long for a socket, or cannot be written.
    """
    path = socket_path(directory)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise TransportError(
            f"socket path {path} has {len(os.fsencode(path))} bytes, sockets allow "
            f"{MAX_SOCKET_PATH_BYTES}; use a data folder with a shorter path"
        )
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        server.bind(str(path))
    except OSError as exc:
        server.close()
        raise TransportError(f"cannot listen on socket {path}: {exc}") from exc
    return SocketListener(
        server,
        address=f"{SCHEME}{path}",
        worker=worker,
        make_link=_make_link,
        max_descriptors=NUM_RINGS,
        path=path,
    )


def connect_shm(address: str, hello: Hello, *, deadline: float, shm_bytes: int) -> ShmLink:
    """Connect to an address of `listen_shm`, bringing `shm_bytes` of memory per direction.

    Raises:
        TransportError: Nobody listens there, the deadline passed, or memory is short.
        FrameError: Something else answered.
    """
    if not address.startswith(SCHEME):
        raise TransportError(f"{address!r} is no address of the form shm:PATH")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors: list[int] = []
    try:
        descriptors = _create_rings(shm_bytes)
        answer = dial(
            sock,
            address.removeprefix(SCHEME),
            hello,
            deadline=deadline,
            descriptors=tuple(descriptors),
        )
        return ShmLink(
            sock,
            peer=answer.worker,
            generation=hello.generation,
            outgoing=RingWriter(descriptors[0]),
            incoming=RingReader(descriptors[1]),
        )
    except OSError as exc:
        sock.close()
        raise TransportError(
            f"cannot share {NUM_RINGS} x {shm_bytes} bytes with {address}: {exc}; "
            "lower router.shm_bytes or use router.transport: tcp"
        ) from exc
    except BaseException:
        sock.close()
        raise
    finally:
        _close_all(descriptors)


def _make_link(sock: socket.socket, hello: Hello, descriptors: Sequence[int]) -> Link:
    if len(descriptors) != NUM_RINGS:
        raise FrameError(
            f"hello of {hello.worker} brought {len(descriptors)} descriptors, expected {NUM_RINGS}"
        )
    return ShmLink(
        sock,
        peer=hello.worker,
        generation=hello.generation,
        outgoing=RingWriter(descriptors[1]),
        incoming=RingReader(descriptors[0]),
    )


def _create_rings(num_bytes: int) -> list[int]:
    """Return descriptors of both rings of a pair: dialling side to listener, then back."""
    outgoing = create_ring_file(num_bytes)
    try:
        return [outgoing, create_ring_file(num_bytes)]
    except OSError:
        os.close(outgoing)
        raise


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
