"""Brings copies of requests to a vault and fetches them. Blocking; for threads of their own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from actors.snapshots.codec import SnapshotBytes
from actors.snapshots.wire import (
    LENGTH_BYTES,
    Answer,
    Drop,
    Found,
    Get,
    Put,
    Question,
    Ready,
    Refused,
    Stored,
    pack,
    send_at_once,
    split_tcp,
    unpack,
    unpack_length,
)
from configs.errors import (
    FrameError,
    PeerClosedError,
    SnapshotError,
    TransportError,
    TransportTimeoutError,
)

T = TypeVar("T", bound=Answer)


class OpenCall:
    """Lets another thread end the blocking calls that are given it, for good."""

    def __init__(self) -> None:
        """Nothing has ended."""
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._is_ended = False

    def end(self) -> None:
        """Let the call that transfers now, and all later ones, raise `TransportError`.

        One that still connects goes on until its time is over.
        """
        with self._lock:
            self._is_ended = True
            if self._connection is not None:
                # OSError: the peer was faster.
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def held(self, connection: socket.socket) -> Iterator[None]:
        """Within, `end` ends this connection; raises `TransportError` if it was called before."""
        with self._lock:
            if self._is_ended:
                raise TransportError("the transfer of a snapshot was given up: its worker stops")
            self._connection = connection
        try:
            yield
        finally:
            with self._lock:
                self._connection = None


def put_snapshot(
    address: str,
    name: str,
    data: SnapshotBytes,
    *,
    timeout_s: float,
    call: OpenCall | None = None,
) -> None:
    """Bring a copy to the vault at `address`.

    Raises:
        SnapshotError: The vault refuses it.
        TransportError: The vault cannot be reached, leaves, or needs longer than `timeout_s`.
    """
    with _open(address, timeout_s, call) as peer:
        peer.ask(Put(name, len(data)), Ready)
        peer.send(data)
        peer.expect(Stored)


def get_snapshot(
    address: str,
    name: str,
    *,
    timeout_s: float,
    max_bytes: int,
    call: OpenCall | None = None,
) -> bytearray:
    """Return a copy from the vault at `address`.

    Raises:
        SnapshotError: The vault has none of that name, or one of more than `max_bytes`.
        TransportError: As `put_snapshot`.
    """
    with _open(address, timeout_s, call) as peer:
        found = peer.ask(Get(name), Found)
        if not 0 <= found.num_bytes <= max_bytes:
            raise SnapshotError(
                f"snapshot {name} at {address} has {found.num_bytes:,} bytes, "
                f"allowed: {max_bytes:,}"
            )
        return peer.receive(found.num_bytes)


def drop_snapshot(
    address: str, name: str, *, timeout_s: float, call: OpenCall | None = None
) -> None:
    """Let the vault at `address` forget a copy; errors as `put_snapshot`."""
    with _open(address, timeout_s, call) as peer:
        peer.ask(Drop(name), Stored)


class _Peer:
    """One connection with one deadline for everything."""

    def __init__(self, connection: socket.socket, address: str, deadline: float) -> None:
        self._connection = connection
        self._address = address
        self._deadline = deadline

    def ask(self, question: Question, kind: type[T]) -> T:
        self.send(pack(question))
        return self.expect(kind)

    def send(self, data: SnapshotBytes) -> None:
        self._set_timeout()
        self._connection.sendall(data)

    def expect(self, kind: type[T]) -> T:
        length = unpack_length(bytes(self.receive(LENGTH_BYTES)))
        answer: Answer = unpack(bytes(self.receive(length)), Answer)  # type: ignore[arg-type]  # a union
        if isinstance(answer, Refused):
            raise SnapshotError(f"{self._address}: {answer.message}")
        if not isinstance(answer, kind):
            raise FrameError(f"{self._address} answers {type(answer).__name__} out of turn")
        return answer

    def receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            self._set_timeout()
            num_read = self._connection.recv_into(view)
            if not num_read:
                raise PeerClosedError(f"{self._address} closed the connection")
            view = view[num_read:]
        return data

    def _set_timeout(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        # Of each call; sendall counts for the whole of it.
        self._connection.settimeout(left_s)


@contextmanager
def _open(address: str, timeout_s: float, call: OpenCall | None) -> Iterator[_Peer]:
    deadline = time.monotonic() + timeout_s
    try:
        with (
            _connect(address, timeout_s) as connection,
            (OpenCall() if call is None else call).held(connection),
        ):
            send_at_once(connection)
            yield _Peer(connection, address, deadline)
    except TimeoutError as exc:
        raise TransportTimeoutError(f"{address} did not finish within {timeout_s:g} s") from exc
    except (OSError, ValueError) as exc:  # ValueError: a path or host that can never be one.
        raise TransportError(f"snapshot vault {address}: {exc}") from exc
    except FrameError as exc:
        raise TransportError(f"{address} is no snapshot vault: {exc}") from exc


def _connect(address: str, timeout_s: float) -> socket.socket:
    scheme, _, rest = address.partition(":")
    host_and_port = split_tcp(rest) if scheme == "tcp" else None
    if host_and_port is not None:
        return socket.create_connection(host_and_port, timeout_s)
    if scheme != "unix" or not rest:
        raise TransportError(
            f"vault address is {address!r}; expected tcp:<host>:<port> or unix:<path>"
        )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(rest)
    except BaseException:
        connection.close()
        raise
    return connection
