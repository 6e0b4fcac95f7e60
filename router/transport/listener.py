"""Accepting peers: one listening socket, and any number of connections whose hello is on its way.

A peer that connects and says nothing, or says something else, costs a descriptor for a while and
disturbs nobody.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.errors import FrameError, TransportError
from configs.ids import WorkerId
from router.transport.base import Hello, Link
from router.transport.handshake import HelloReader, encode_hello

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
"""A connection without a complete hello is dropped after this many seconds."""
BACKLOG = 1024

MakeLink = Callable[[socket.socket, Hello, Sequence[int]], Link]
"""Makes a link of a connected socket, the peer's hello and its descriptors, which stay open."""


class _Pending:
    """A connection whose hello is not complete."""

    def __init__(self, sock: socket.socket, *, max_descriptors: int, deadline: float) -> None:
        self.sock = sock
        self.reader = HelloReader(sock, max_descriptors=max_descriptors)
        self.deadline = deadline

    def close(self) -> None:
        self.reader.close_descriptors()
        self.sock.close()


class SocketListener:
    """Where an expert worker is reached over a kind of socket. Owns the socket and its file."""

    def __init__(
        self,
        server: socket.socket,
        *,
        address: str,
        worker: WorkerId,
        make_link: MakeLink,
        max_descriptors: int = 0,
        path: Path | None = None,
    ) -> None:
        """Take over a bound socket and start to listen.

        Args:
            server: Bound, not yet listening.
            address: What peers pass to `connect`.
            worker: Own name, for the answer to a hello.
            make_link: Makes the link of a complete hello.
            max_descriptors: Descriptors that may come with a hello.
            path: File of the socket, unlinked on `close`.
        """
        self._server = server
        self._address = address
        self._worker = worker
        self._make_link = make_link
        self._max_descriptors = max_descriptors
        self._path = path
        self._pending: dict[int, _Pending] = {}
        self._closed = False
        server.settimeout(0)
        server.listen(BACKLOG)
        # An epoll is itself readable while one of its sockets is: one descriptor for all of them.
        self._epoll = select.epoll()
        self._epoll.register(server.fileno(), select.EPOLLIN)

    @property
    def address(self) -> str:
        """What a peer passes to `connect`."""
        return self._address

    def fileno(self) -> int:
        """Descriptor that is readable when `try_accept` may have something."""
        return self._epoll.fileno()

    def try_accept(self) -> Link | None:
        """Return the next connected peer after its hello, or None. Never blocks."""
        if self._closed:
            return None
        self._drop_silent(time.monotonic())
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._server.fileno():
                self._accept_waiting()
                continue
            link = self._try_finish(descriptor)
            if link is not None:
                return link
        return None

    def close(self) -> None:
        """Stop listening; links live on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._epoll.close()
        self._server.close()
        for pending in self._pending.values():
            pending.close()
        self._pending.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept_waiting(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                log.warning("%s: a connection was lost while accepting it: %s", self._address, exc)
                return
            sock.settimeout(0)
            self._pending[sock.fileno()] = _Pending(
                sock,
                max_descriptors=self._max_descriptors,
                deadline=time.monotonic() + HELLO_TIMEOUT_S,
            )
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _try_finish(self, descriptor: int) -> Link | None:
        pending = self._pending[descriptor]
        try:
            hello = pending.reader.try_read()
            if hello is None:
                return None
            link = self._make_link(pending.sock, hello, pending.reader.descriptors)
            answer = Hello(worker=self._worker, generation=hello.generation)
            pending.sock.send(encode_hello(answer))
        except (TransportError, FrameError, OSError) as exc:
            self._forget(descriptor).close()
            log.warning("%s: refused a peer: %s", self._address, exc)
            return None
        self._forget(descriptor).reader.close_descriptors()
        return link

    def _forget(self, descriptor: int) -> _Pending:
        self._epoll.unregister(descriptor)
        return self._pending.pop(descriptor)

    def _drop_silent(self, now: float) -> None:
        late = [number for number, pending in self._pending.items() if now > pending.deadline]
        for number in late:
            self._forget(number).close()
            log.warning("%s: dropped a peer that said no hello", self._address)
