"""Links within one process: a socket pair between two threads, for tests and small clusters."""

from __future__ import annotations

import os
import queue
import socket
import threading

from configs.errors import PeerClosedError, TransportError
from configs.ids import WorkerId
from router.transport.base import Hello, Link
from router.transport.stream import StreamLink

SCHEME = "local:"
_lock = threading.Lock()
_listeners: dict[str, LocalListener] = {}


class LocalListener:
    """Where an expert worker is reached from its own process."""

    def __init__(self, worker: WorkerId) -> None:
        """Make a listener; `listen_local` gives it an address."""
        self.worker = worker
        self._waiting: queue.SimpleQueue[StreamLink] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        self._closed = False

    @property
    def address(self) -> str:
        """What a peer passes to `connect`."""
        return f"{SCHEME}{self.worker}"

    def fileno(self) -> int:
        """Descriptor that is readable when `try_accept` may have something."""
        return self._event

    def try_accept(self) -> Link | None:
        """Return the next connected peer, or None. Never blocks."""
        try:
            link = self._waiting.get_nowait()
        except queue.Empty:
            return None
        os.eventfd_read(self._event)
        return link

    def close(self) -> None:
        """Stop listening; accepted links live on. Idempotent."""
        with _lock:
            if self._closed:
                return
            self._closed = True
            if _listeners.get(self.address) is self:
                del _listeners[self.address]
            while not self._waiting.empty():
                self._waiting.get_nowait().close()
            os.close(self._event)

    def offer(self, link: StreamLink) -> None:
        """Hand over the far end of a new connection. Called under the lock."""
        self._waiting.put(link)
        os.eventfd_write(self._event, 1)


def listen_local(*, worker: WorkerId) -> LocalListener:
    """Listen under the worker's name in this process.

    Raises:
        TransportError: The name is taken.
    """
    listener = LocalListener(worker)
    with _lock:
        taken = listener.address in _listeners
        if not taken:
            _listeners[listener.address] = listener
    if taken:
        listener.close()
        raise TransportError(f"{listener.address} is taken in this process; close it first")
    return listener


def connect_local(address: str, hello: Hello) -> StreamLink:
    """Connect to an address of `listen_local`; returns before the listener has accepted.

    Raises:
        PeerClosedError: Nobody in this process listens there.
    """
    with _lock:
        listener = _listeners.get(address)
        if listener is None:
            raise PeerClosedError(f"nobody in this process listens on {address}")
        near, far = socket.socketpair()
        listener.offer(StreamLink(far, peer=hello.worker, generation=hello.generation))
        return StreamLink(near, peer=listener.worker, generation=hello.generation)


def is_reachable(address: str) -> bool:
    """Whether a listener of this process has this address."""
    with _lock:
        return address in _listeners
