"""Links between hosts: header and payload on one TCP connection."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from configs.errors import PortInUseError, TransportError
from configs.ids import WorkerId
from router.transport.base import Hello, Link
from router.transport.handshake import dial
from router.transport.listener import SocketListener
from router.transport.stream import StreamLink

SCHEME = "tcp:"


def listen_tcp(*, worker: WorkerId, host: str, port: int = 0) -> SocketListener:
    """Listen on a host and port; port 0 takes a free one, which the address states.

    Raises:
        PortInUseError: The port is taken.
        TransportError: The host is not one of this machine.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, socket.SOCK_STREAM)
    except OSError as exc:
        raise TransportError(f"cannot listen on {host}:{port}: {exc}") from exc
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(target)
    except OSError as exc:
        server.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortInUseError(f"port {port} on {host} is taken; choose another or 0") from exc
        raise TransportError(f"cannot listen on {host}:{port}: {exc}") from exc
    return SocketListener(
        server,
        address=f"{SCHEME}{host}:{server.getsockname()[1]}",
        worker=worker,
        make_link=_make_link,
    )


def connect_tcp(address: str, hello: Hello, *, deadline: float) -> StreamLink:
    """Connect to an address of `listen_tcp`.

    Raises:
        TransportError: The address is none, nobody listens there, or the deadline passed.
        FrameError: Something else answered.
    """
    host, separator, port = address.removeprefix(SCHEME).rpartition(":")
    if not address.startswith(SCHEME) or not separator or not port.isdecimal():
        raise TransportError(f"{address!r} is no address of the form tcp:HOST:PORT")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
    except OSError as exc:
        raise TransportError(f"cannot resolve {host!r} of {address}: {exc}") from exc
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        answer = dial(sock, (host, int(port)), hello, deadline=deadline)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return StreamLink(sock, peer=answer.worker, generation=hello.generation)


def _make_link(sock: socket.socket, hello: Hello, descriptors: Sequence[int]) -> Link:
    del descriptors
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return StreamLink(sock, peer=hello.worker, generation=hello.generation)
