"""How a conformance test opens each kind of transport. A new kind joins by adding a rig."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from configs.ids import Generation, WorkerId
from router.transport.base import Hello, Link, Listener
from router.transport.connect import TransportKind, connect, listen

EXPERT = WorkerId("expert-1")
ATTENTION = WorkerId("attention-1")
SHM_BYTES = 1 << 18
DEADLINE_S = 20.0


@dataclass(frozen=True)
class TransportRig:
    """One kind of transport."""

    kind: TransportKind
    crosses_processes: bool

    def listen(self, folder: Path, worker: WorkerId = EXPERT) -> Listener:
        """Open a listener."""
        return listen(self.kind, worker=worker, directory=folder, host="127.0.0.1")

    def dial(
        self,
        address: str,
        *,
        worker: WorkerId = ATTENTION,
        generation: int = 1,
        timeout_s: float = DEADLINE_S,
    ) -> Link:
        """Connect; blocks until the listener accepts, unless the transport needs no answer."""
        return connect(
            address,
            Hello(worker=worker, generation=Generation(generation)),
            deadline=time.monotonic() + timeout_s,
            shm_bytes=SHM_BYTES,
        )

    def dial_raw(self, address: str) -> socket.socket:
        """Connect a bare socket that has said nothing."""
        _, _, target = address.partition(":")
        if self.kind == "shm":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(target)
            return sock
        host, _, port = target.rpartition(":")
        return socket.create_connection((host, int(port)))

    def write_raw(self, link: Link, data: bytes) -> None:
        """Put bytes on the header channel of a link, past its codec."""
        os.write(link.fileno(), data)

    @contextmanager
    def pair(self, folder: Path, **dial_options: object) -> Iterator[tuple[Link, Link]]:
        """Yield a connected (attention side, expert side)."""
        listener = self.listen(folder)
        try:
            near, far = connect_pair(self, listener, **dial_options)
        finally:
            listener.close()
        try:
            yield near, far
        finally:
            near.close()
            far.close()


RIGS = (
    TransportRig("local", crosses_processes=False),
    TransportRig("shm", crosses_processes=True),
    TransportRig("tcp", crosses_processes=True),
)
SOCKET_RIGS = tuple(rig for rig in RIGS if rig.crosses_processes)


def connect_pair(
    rig: TransportRig, listener: Listener, **dial_options: object
) -> tuple[Link, Link]:
    """Dial a listener from a thread and accept; return (attention side, expert side)."""
    near: list[Link] = []
    errors: list[BaseException] = []

    def dial() -> None:
        try:
            near.append(rig.dial(listener.address, **dial_options))  # type: ignore[arg-type]
        except BaseException as exc:  # noqa: BLE001 - handed to the test below
            errors.append(exc)

    thread = threading.Thread(target=dial)
    thread.start()
    far = accept(listener)
    thread.join()
    if errors:
        raise errors[0]
    return near[0], far


def accept(listener: Listener) -> Link:
    """Accept the next peer."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        link = listener.try_accept()
        if link is not None:
            return link
    raise TimeoutError(f"nobody connected to {listener.address}")
