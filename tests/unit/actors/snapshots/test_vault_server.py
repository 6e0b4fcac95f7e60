"""A vault over real sockets: what peers do wrong costs them their connection, and nobody else."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from actors.snapshots import server as server_module
from actors.snapshots.client import OpenCall, drop_snapshot, get_snapshot, put_snapshot
from actors.snapshots.memory import MemoryVault
from actors.snapshots.server import VaultServer
from actors.snapshots.wire import MAX_MESSAGE_BYTES, Get, Put, Ready, Refused, pack
from configs.errors import SnapshotError, TransportError, TransportTimeoutError
from tests.fakes.stalling_vault import StallingVault
from tests.fakes.vault_process import vault_process
from tests.fakes.waiting import wait_until

MAX_BYTES = 4 << 20
TIMEOUT_S = 20.0


class Served:
    def __init__(self, **settings: object) -> None:
        self.vault = MemoryVault(MAX_BYTES)
        self.server = VaultServer(self.vault, **settings)
        self.address = self.server.start()

    def connect(self) -> socket.socket:
        host, port = self.address.removeprefix("tcp:").split(":")
        return socket.create_connection((host, int(port)), TIMEOUT_S)

    def put(self, name: str, data: bytes) -> None:
        put_snapshot(self.address, name, data, timeout_s=TIMEOUT_S)

    def get(self, name: str, max_bytes: int = MAX_BYTES) -> bytearray:
        return get_snapshot(self.address, name, timeout_s=TIMEOUT_S, max_bytes=max_bytes)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


@pytest.fixture
def impatient() -> Iterator[Served]:
    served = Served(stall_timeout_s=0.05)
    yield served
    served.server.close()


def is_closed(connection: socket.socket) -> bool:
    """Read until the peer closes; the timeout of the connection ends a wait for ever."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("num_bytes", [0, 1, 70_000, MAX_BYTES])
def test_bytes_go_there_and_come_back(served: Served, num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    served.put("a", data)
    assert served.get("a") == data
    drop_snapshot(served.address, "a", timeout_s=TIMEOUT_S)
    with pytest.raises(SnapshotError, match="not in"):
        served.get("a")


def test_a_unix_socket_serves_too_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "vault.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))  # What a killed worker leaves.
    stale.close()
    served = Served(unix_path=path)
    assert served.address == f"unix:{path}"
    served.put("a", b"data")
    assert served.get("a") == b"data"
    served.server.close()
    served.server.close()
    assert not path.exists()
    with pytest.raises(TransportError):
        served.get("a")


def test_an_address_that_is_taken_is_an_error_at_the_start(served: Served) -> None:
    port = int(served.address.rpartition(":")[2])
    with pytest.raises(TransportError, match="cannot listen"):
        VaultServer(MemoryVault(1), port=port).start()


@pytest.mark.parametrize(
    "address",
    [
        "",
        "x",
        "tcp:",
        "tcp:host",
        "tcp:127.0.0.1:99999999",
        "tcp:127.0.0.1:70000",
        "tcp:..:1",
        "unix:",
        "unix:/nowhere/a",
        "unix:a\0b",
        f"unix:{'x' * 200}",
        "folder:/tmp",
    ],
    ids=ascii,
)
def test_addresses_that_cannot_be_are_transport_errors(address: str) -> None:
    with pytest.raises(TransportError):
        get_snapshot(address, "a", timeout_s=TIMEOUT_S, max_bytes=1)


def test_a_copy_larger_than_the_vault_is_refused_before_its_bytes(served: Served) -> None:
    served.put("kept", b"kept")
    with served.connect() as connection:
        connection.sendall(pack(Put("a", MAX_BYTES + 1)))
        # The bytes were never sent, and the answer is there.
        assert b"exceeds" in connection.recv(4096)
        connection.sendall(pack(Get("kept")))
        assert b"found" in connection.recv(4096)


def test_a_bad_name_is_refused_before_its_bytes(served: Served) -> None:
    with pytest.raises(SnapshotError, match="name"):
        served.put("../a", b"data")
    assert served.vault._reserved_bytes == 0


def test_those_on_their_way_count(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(pack(Put("slow", MAX_BYTES - 10)))
        assert connection.recv(4096) == pack(Ready())
        with pytest.raises(SnapshotError, match="11 bytes exceeds the 10 bytes"):
            served.put("a", bytes(11))
        served.put("b", bytes(10))
    wait_until(lambda: served.vault._reserved_bytes == 0)
    served.put("a", bytes(MAX_BYTES))


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xff\xff\xff\xff",
        (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"),
        b"\x01\x00\x00\x00\xc1",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x00",
        pack(Ready()),
        pack(Refused("no")),
        pack(Put("a", -1)),
    ],
    ids=ascii,
)
def test_rubbish_closes_its_own_connection_only(served: Served, rubbish: bytes) -> None:
    with served.connect() as good, served.connect() as bad:
        bad.sendall(rubbish)
        assert is_closed(bad)
        good.sendall(pack(Get("a")))
        assert b"not in" in good.recv(4096)
    assert served.vault._reserved_bytes == 0


def test_random_bytes_never_hurt(served: Served) -> None:
    draw = random.Random(5)
    for _ in range(50):
        with served.connect() as connection:
            message = bytearray(pack(Put("a", 100)))
            for _ in range(draw.randint(1, 3)):
                message[draw.randrange(len(message))] = draw.randrange(256)
            connection.sendall(message[: draw.randint(0, len(message))])
    served.put("a", b"data")
    assert served.get("a") == b"data"
    wait_until(lambda: served.vault._reserved_bytes == 0)


@pytest.mark.parametrize(
    "start", [pack(Put("a", 100))[:3], pack(Put("a", 100))[:-1], pack(Put("a", 100)) + bytes(50)]
)
def test_a_peer_that_stalls_is_dropped_and_its_room_is_free_again(
    impatient: Served, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "IDLE_TIMEOUT_S", 0.05)
    with impatient.connect() as connection:
        connection.sendall(start)
        assert is_closed(connection)
    wait_until(lambda: impatient.vault._reserved_bytes == 0)
    assert impatient.vault.num_snapshots == 0


def test_a_peer_that_does_not_read_is_dropped(impatient: Served) -> None:
    impatient.vault.save("a", bytes(MAX_BYTES))
    with impatient.connect() as connection:
        for _ in range(8):
            connection.sendall(pack(Get("a")))
        wait_until(lambda: not impatient.server._tasks)


def test_a_peer_that_drips_is_dropped_in_bounded_time(
    impatient: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MIN_BYTES_PER_S", 1 << 30)
    with impatient.connect() as connection:
        connection.sendall(pack(Put("a", MAX_BYTES)))
        assert connection.recv(4096) == pack(Ready())

        def is_dropped() -> bool:
            try:
                connection.sendall(b"1")
            except OSError:
                return True
            return False

        wait_until(is_dropped)
    assert impatient.vault.num_snapshots == 0


def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
    with served.connect() as first:
        first.sendall(pack(Get("a")))
        assert first.recv(4096)
        with served.connect() as second:
            assert is_closed(second)
    wait_until(lambda: not served.server._tasks)
    served.put("a", b"data")


def test_closing_drops_who_is_in_the_middle(served: Served) -> None:
    with served.connect() as connection:
        connection.sendall(pack(Put("a", 100)))
        assert connection.recv(4096) == pack(Ready())
        served.server.close()
        assert is_closed(connection)
    assert (served.vault._reserved_bytes, served.vault.num_snapshots) == (0, 0)


def test_what_is_larger_than_expected_is_not_fetched(served: Served) -> None:
    served.put("a", bytes(11))
    with pytest.raises(SnapshotError, match="11 bytes, allowed: 10"):
        served.get("a", max_bytes=10)


def test_a_call_ends_in_time_when_the_vault_stalls() -> None:
    with StallingVault() as vault, pytest.raises(TransportTimeoutError, match=r"0\.1 s"):
        put_snapshot(vault.address, "a", bytes(32 << 20), timeout_s=0.1)
    with StallingVault() as vault, pytest.raises(TransportTimeoutError):
        get_snapshot(vault.address, "a", timeout_s=0.1, max_bytes=8 << 20)


def test_a_call_can_be_ended_from_another_thread() -> None:
    call = OpenCall()
    with StallingVault() as vault:
        ender = threading.Thread(target=lambda: vault.is_in_transfer.wait(10) and call.end())
        ender.start()
        with pytest.raises(TransportError):
            put_snapshot(vault.address, "a", bytes(32 << 20), timeout_s=TIMEOUT_S, call=call)
        ender.join()
    with StallingVault() as vault, pytest.raises(TransportError, match="given up"):
        put_snapshot(vault.address, "a", b"", timeout_s=TIMEOUT_S, call=call)


def test_what_answers_may_be_anything() -> None:
    for answer in (
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        pack(Get("a")),
        pack(Ready()),
        b"",
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve(listener: socket.socket = listener, answer: bytes = answer) -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

            thread = threading.Thread(target=serve)
            thread.start()
            port = listener.getsockname()[1]
            with pytest.raises(TransportError):
                get_snapshot(f"tcp:127.0.0.1:{port}", "a", timeout_s=TIMEOUT_S, max_bytes=9)
            thread.join()


def test_a_vault_in_another_process_can_be_killed_at_any_time() -> None:
    data = random.Random(1).randbytes(1 << 20)
    with vault_process() as (process, address):
        put_snapshot(address, "a", data, timeout_s=TIMEOUT_S)
        assert get_snapshot(address, "a", timeout_s=TIMEOUT_S, max_bytes=1 << 20) == data
        process.kill()
        process.wait()
        with pytest.raises(TransportError):
            get_snapshot(address, "a", timeout_s=TIMEOUT_S, max_bytes=1 << 20)


def test_many_at_once_all_come_back(served: Served) -> None:
    def use(number: int) -> bool:
        for turn in range(5):
            data = random.Random(number * 10 + turn).randbytes(100_000)
            served.put(f"a{number}", data)
            if served.get(f"a{number}") != data:
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(use, range(8))) == [True] * 8
