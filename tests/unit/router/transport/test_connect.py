from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.errors import FrameError, PortInUseError, TransportError
from configs.ids import Generation, WorkerId
from router.membership import ExpertWorkerInfo
from router.transport.base import Hello, Link, Listener
from router.transport.connect import (
    TransportChoice,
    TransportKind,
    connect,
    connect_worker,
    host_token,
    listen,
)
from router.transport.shm import ShmLink
from router.transport.tcp import listen_tcp
from tests.fakes.transport_rigs import EXPERT, accept

HELLO = Hello(worker=WorkerId("attention-1"), generation=Generation(1))


def open_all(folder: Path, kinds: Sequence[TransportKind]) -> list[Listener]:
    return [listen(kind, worker=EXPERT, directory=folder, host="127.0.0.1") for kind in kinds]


def dial(
    listeners: list[Listener],
    *,
    choice: TransportChoice,
    token: str,
    addresses: Sequence[str] | None = None,
    worker: WorkerId = EXPERT,
) -> Link:
    info = ExpertWorkerInfo(
        worker=worker,
        addresses=tuple(listener.address for listener in listeners)
        if addresses is None
        else tuple(addresses),
        host_token=token,
    )
    stop = threading.Event()
    links: list[Link] = []

    def accept_all() -> None:
        while not stop.is_set():
            links.extend(link for listener in listeners if (link := listener.try_accept()))

    thread = threading.Thread(target=accept_all)
    thread.start()
    try:
        return connect_worker(
            info, HELLO, choice=choice, deadline=time.monotonic() + 20, shm_bytes=1 << 16
        )
    finally:
        stop.set()
        thread.join()
        for link in links:
            link.close()
        for listener in listeners:
            listener.close()


def test_auto_takes_shared_memory_where_both_sides_share_it(folder: Path) -> None:
    listeners = open_all(folder, ["tcp", "shm"])
    link = dial(listeners, choice="auto", token=host_token(folder))
    assert isinstance(link, ShmLink)
    link.close()


def test_auto_takes_tcp_when_the_peer_is_on_another_host(folder: Path) -> None:
    listeners = open_all(folder, ["shm", "tcp"])
    link = dial(listeners, choice="auto", token="another boot:1:2")
    assert not isinstance(link, ShmLink)
    link.close()


def test_auto_takes_tcp_when_shared_memory_does_not_work(folder: Path) -> None:
    listeners = open_all(folder, ["tcp"])
    addresses = [f"shm:{folder}/gone.sock", listeners[0].address]
    link = dial(listeners, choice="auto", token=host_token(folder), addresses=addresses)
    assert not isinstance(link, ShmLink)
    link.close()


def test_auto_takes_a_listener_of_this_process_last(folder: Path) -> None:
    listeners = open_all(folder, ["local"])
    dial(listeners, choice="auto", token="").close()


def test_a_transport_that_the_worker_does_not_offer_is_an_error(folder: Path) -> None:
    listeners = open_all(folder, ["tcp"])
    with pytest.raises(TransportError, match="none of it is usable with transport 'shm'"):
        dial(listeners, choice="shm", token=host_token(folder))


def test_another_worker_at_the_address_is_an_error(folder: Path) -> None:
    listeners = open_all(folder, ["tcp"])
    with pytest.raises(FrameError, match="belongs to expert-1, expected expert-9"):
        dial(listeners, choice="tcp", token="", worker=WorkerId("expert-9"))


@pytest.mark.parametrize(
    "address",
    ["udp:1", "tcp:nohost", "tcp:host:port", "shm:/nowhere/x.sock", "local:nobody"],
)
def test_an_address_where_nobody_is_is_an_error(address: str) -> None:
    with pytest.raises(TransportError):
        connect(address, HELLO, deadline=time.monotonic() + 20, shm_bytes=1 << 16)


def test_the_host_token_tells_folders_apart(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    assert host_token(folder / "a") == host_token(folder / "a")
    assert host_token(folder / "a") != host_token(folder / "b")


def test_the_host_token_of_a_missing_folder_is_an_error(folder: Path) -> None:
    with pytest.raises(TransportError, match="cannot tell which host"):
        host_token(folder / "missing")


def test_a_socket_path_that_is_too_long_is_an_error_with_the_limit(folder: Path) -> None:
    with pytest.raises(TransportError, match="sockets allow 107"):
        listen("shm", worker=EXPERT, directory=folder / ("x" * 100), host="")


def test_a_taken_port_is_named() -> None:
    listener = listen_tcp(worker=EXPERT, host="127.0.0.1")
    port = int(listener.address.rpartition(":")[2])
    with pytest.raises(PortInUseError, match=f"port {port}"):
        listen_tcp(worker=EXPERT, host="127.0.0.1", port=port)
    listener.close()


def test_a_host_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(TransportError, match="cannot listen on"):
        listen_tcp(worker=EXPERT, host="192.0.2.1")


def test_a_local_name_is_taken_once(folder: Path) -> None:
    first = listen("local", worker=EXPERT, directory=folder, host="")
    with pytest.raises(TransportError, match="is taken"):
        listen("local", worker=EXPERT, directory=folder, host="")
    first.close()
    listen("local", worker=EXPERT, directory=folder, host="").close()


def test_ipv6_addresses_are_understood(folder: Path) -> None:
    listener = listen_tcp(worker=EXPERT, host="::1")
    thread = threading.Thread(target=lambda: accept(listener).close())
    thread.start()
    link = connect(listener.address, HELLO, deadline=time.monotonic() + 20, shm_bytes=1 << 16)
    thread.join()
    link.close()
    listener.close()
