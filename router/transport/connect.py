"""Choosing and opening transports: the one place that knows all of them by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from configs.errors import FrameError, TransportError
from configs.ids import WorkerId
from router.membership import ExpertWorkerInfo
from router.transport import local, shm, tcp
from router.transport.base import Hello, Link, Listener

log = logging.getLogger(__name__)

TransportKind = Literal["local", "shm", "tcp"]
TransportChoice = Literal["auto", "local", "shm", "tcp"]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_token(directory: Path) -> str:
    """Name of the kernel and file system behind a folder.

    Equal for two processes only if they run under one kernel and see the same folder, which node
    names do not tell in containers.

    Raises:
        TransportError: There is no such folder.
    """
    try:
        boot_id = _BOOT_ID.read_text().strip()
        status = directory.stat()
    except OSError as exc:
        raise TransportError(f"cannot tell which host {directory} is on: {exc}") from exc
    return f"{boot_id}:{status.st_dev}:{status.st_ino}"


def listen(kind: TransportKind, *, worker: WorkerId, directory: Path, host: str) -> Listener:
    """Open a listener.

    Args:
        kind: Transport.
        worker: Own name.
        directory: Folder for sockets (`shm`).
        host: Address to bind (`tcp`); the port is any free one.

    Raises:
        TransportError: It cannot be opened; states why.
    """
    if kind == "local":
        return local.listen_local(worker=worker)
    if kind == "shm":
        return shm.listen_shm(worker=worker, directory=directory)
    return tcp.listen_tcp(worker=worker, host=host)


def connect(address: str, hello: Hello, *, deadline: float, shm_bytes: int) -> Link:
    """Connect to one address of a listener.

    Raises:
        TransportError: The address is of no known kind, or nobody answers there in time.
        FrameError: Something else answered.
    """
    if address.startswith(local.SCHEME):
        return local.connect_local(address, hello)
    if address.startswith(shm.SCHEME):
        return shm.connect_shm(address, hello, deadline=deadline, shm_bytes=shm_bytes)
    if address.startswith(tcp.SCHEME):
        return tcp.connect_tcp(address, hello, deadline=deadline)
    raise TransportError(f"address {address!r} is of no known kind; known: local:, shm:, tcp:")


def connect_worker(
    info: ExpertWorkerInfo,
    hello: Hello,
    *,
    choice: TransportChoice,
    deadline: float,
    shm_bytes: int,
) -> Link:
    """Connect to an expert worker by the chosen transport.

    `auto` takes shared memory where both sides really share it, else TCP, else a listener of this
    process.

    Raises:
        TransportError: The worker does not offer the transport, or cannot be reached by it.
        FrameError: Something else answered, or another worker than expected.
    """
    candidates = _candidates(info, choice)
    if not candidates:
        raise TransportError(
            f"{info.worker} offers {list(info.addresses)}; none of it is usable with transport "
            f"{choice!r} from here"
        )
    for address in candidates[:-1]:
        try:
            return _connect_checked(info, address, hello, deadline=deadline, shm_bytes=shm_bytes)
        except (TransportError, FrameError) as exc:
            log.warning("%s is not reached by %s: %s", info.worker, address, exc)
    return _connect_checked(info, candidates[-1], hello, deadline=deadline, shm_bytes=shm_bytes)


def _connect_checked(
    info: ExpertWorkerInfo, address: str, hello: Hello, *, deadline: float, shm_bytes: int
) -> Link:
    link = connect(address, hello, deadline=deadline, shm_bytes=shm_bytes)
    if link.peer != info.worker:
        link.close()
        raise FrameError(f"{address} belongs to {link.peer}, expected {info.worker}")
    return link


def _candidates(info: ExpertWorkerInfo, choice: TransportChoice) -> list[str]:
    """Addresses to try, best first."""
    if choice != "auto":
        return [address for address in info.addresses if address.startswith(f"{choice}:")]
    shared = [a for a in info.addresses if a.startswith(shm.SCHEME) and _is_shared(info, a)]
    remote = [a for a in info.addresses if a.startswith(tcp.SCHEME)]
    own = [a for a in info.addresses if local.is_reachable(a)]
    return shared + remote + own


def _is_shared(info: ExpertWorkerInfo, address: str) -> bool:
    directory = Path(address.removeprefix(shm.SCHEME)).parent
    try:
        return host_token(directory) == info.host_token
    except TransportError:
        return False
