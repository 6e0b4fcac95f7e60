"""Copies on their way in: from wherever they lie, checked, and removed there afterwards."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import SnapshotPlace
from actors.snapshots.codec import encode_snapshot
from actors.snapshots.folder import FolderVault
from actors.snapshots.loader import SnapshotLoader
from actors.snapshots.memory import MemoryVault
from actors.snapshots.server import VaultServer
from configs.errors import ServingError, SnapshotError, TransportError, TransportTimeoutError
from tests.fakes.snapshots import make_snapshot, same_bits
from tests.fakes.stalling_vault import StallingVault
from tests.fakes.waiting import wait_until

WAIT_S = 30.0
OWN_ADDRESS = "unix:/its/own"
SNAPSHOT = make_snapshot(5)
DATA = encode_snapshot(SNAPSHOT)


class Rig:
    def __init__(self, timeout_s: float = WAIT_S, max_pending: int = 2) -> None:
        self.own = MemoryVault(1 << 20)
        self.peer = MemoryVault(1 << 20)
        self.server = VaultServer(self.peer)
        self.peer_address = self.server.start()
        self.loader = SnapshotLoader(
            "test",
            own=self.own,
            own_address=OWN_ADDRESS,
            timeout_s=timeout_s,
            max_pending=max_pending,
            max_bytes=1 << 23,
        )
        self.ends: queue.SimpleQueue[RequestSnapshot | ServingError] = queue.SimpleQueue()

    def try_load(self, place: SnapshotPlace) -> bool:
        return self.loader.try_load(place, self.ends.put)

    def load(self, place: SnapshotPlace) -> RequestSnapshot | ServingError:
        assert self.try_load(place)
        return self.ends.get(timeout=WAIT_S)

    def error(self, place: SnapshotPlace) -> ServingError:
        end = self.load(place)
        assert isinstance(end, ServingError)
        return end


@contextmanager
def open_rig(timeout_s: float = WAIT_S, max_pending: int = 2) -> Iterator[Rig]:
    rig = Rig(timeout_s, max_pending)
    try:
        yield rig
    finally:
        rig.loader.close()
        rig.server.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with open_rig() as rig:
        yield rig


def place_at(address: str, data: bytes | bytearray = DATA) -> SnapshotPlace:
    return SnapshotPlace(address, "a", 5, len(data))


def test_a_copy_comes_from_the_workers_own_memory(rig: Rig) -> None:
    rig.own.save("a", DATA)
    end = rig.load(place_at(OWN_ADDRESS))
    assert isinstance(end, RequestSnapshot)
    assert same_bits(end, SNAPSHOT)
    wait_until(lambda: rig.own.num_snapshots == 0)


def test_a_copy_comes_from_a_peer_and_is_gone_there(rig: Rig) -> None:
    rig.peer.save("a", DATA)
    end = rig.load(place_at(rig.peer_address))
    assert isinstance(end, RequestSnapshot)
    assert same_bits(end, SNAPSHOT)
    wait_until(lambda: rig.peer.num_snapshots == 0)


def test_a_copy_comes_from_a_folder_and_is_gone_there(rig: Rig, tmp_path: Path) -> None:
    FolderVault(tmp_path, max_bytes=1 << 20).save("a", DATA)
    end = rig.load(place_at(f"folder:{tmp_path}"))
    assert isinstance(end, RequestSnapshot)
    assert same_bits(end, SNAPSHOT)
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_damaged_copy_is_refused_wherever_it_lies(rig: Rig, tmp_path: Path) -> None:
    data = bytearray(DATA)
    data[len(data) // 2] ^= 1
    rig.own.save("a", data)
    rig.peer.save("a", data)
    FolderVault(tmp_path, max_bytes=1 << 20).save("a", data)
    for address in (OWN_ADDRESS, rig.peer_address, f"folder:{tmp_path}"):
        error = rig.error(place_at(address))
        assert isinstance(error, SnapshotError)
        assert "checksum" in error.message


def test_another_length_than_announced_is_refused(rig: Rig, tmp_path: Path) -> None:
    rig.own.save("a", DATA)
    rig.peer.save("a", DATA)
    FolderVault(tmp_path, max_bytes=1 << 20).save("a", DATA)
    for address in (OWN_ADDRESS, rig.peer_address, f"folder:{tmp_path}"):
        for num_bytes in (-1, 0, 1, len(DATA) - 1, len(DATA) + 1, 1 << 60):
            place = msgspec.structs.replace(place_at(address), num_bytes=num_bytes)
            assert isinstance(rig.error(place), SnapshotError)


@pytest.mark.parametrize("position", [0, 4, 6])
def test_another_position_than_announced_is_refused(rig: Rig, position: int) -> None:
    rig.own.save("a", DATA)
    error = rig.error(msgspec.structs.replace(place_at(OWN_ADDRESS), position=position))
    assert "5 tokens" in error.message
    assert rig.own.num_snapshots == 1


def test_what_is_not_there_is_refused(rig: Rig, tmp_path: Path) -> None:
    for address in (OWN_ADDRESS, rig.peer_address, f"folder:{tmp_path}", "folder:/nowhere/at/all"):
        assert isinstance(rig.error(place_at(address)), SnapshotError)


@pytest.mark.parametrize("address", ["", "unix:/nowhere/vault", "tcp:127.0.0.1:0", "http://a"])
def test_an_address_where_nobody_is_is_a_transport_error(rig: Rig, address: str) -> None:
    assert isinstance(rig.error(place_at(address)), TransportError)


@pytest.mark.parametrize("name", ["../a", "", "a/b"])
def test_a_bad_name_is_refused(rig: Rig, name: str, tmp_path: Path) -> None:
    for address in (OWN_ADDRESS, rig.peer_address, f"folder:{tmp_path}"):
        place = msgspec.structs.replace(place_at(address), name=name)
        assert isinstance(rig.error(place), SnapshotError)


def test_a_peer_that_stalls_is_an_error_in_time() -> None:
    with open_rig(timeout_s=0.1) as rig, StallingVault() as vault:
        place = SnapshotPlace(vault.address, "a", 5, 8 << 20)
        assert isinstance(rig.error(place), TransportTimeoutError)
        rig.own.save("a", DATA)
        assert isinstance(rig.load(place_at(OWN_ADDRESS)), RequestSnapshot)


def test_what_waits_is_bounded_and_closing_tells_every_end_once() -> None:
    with open_rig(timeout_s=3600.0, max_pending=2) as rig, StallingVault() as vault:
        place = SnapshotPlace(vault.address, "a", 5, 8 << 20)
        assert rig.try_load(place)
        assert vault.is_in_transfer.wait(WAIT_S)
        assert rig.try_load(place)
        assert not rig.try_load(place)
        rig.loader.close()
        rig.loader.close()
        assert not rig.try_load(place)
        ends = [rig.ends.get(timeout=WAIT_S) for _ in range(2)]
        assert all(isinstance(end, ServingError) for end in ends)
        assert rig.ends.empty()


def test_a_worker_without_a_vault_loads_from_others(tmp_path: Path) -> None:
    FolderVault(tmp_path, max_bytes=1 << 20).save("a", DATA)
    ends: queue.SimpleQueue[RequestSnapshot | ServingError] = queue.SimpleQueue()
    loader = SnapshotLoader(
        "test", own=None, own_address=None, timeout_s=WAIT_S, max_pending=1, max_bytes=1 << 20
    )
    try:
        assert loader.try_load(place_at(f"folder:{tmp_path}"), ends.put)
        assert isinstance(ends.get(timeout=WAIT_S), RequestSnapshot)
    finally:
        loader.close()


def test_who_fails_to_take_an_end_does_not_stop_the_others(rig: Rig) -> None:
    def fail(_: RequestSnapshot | ServingError) -> None:
        raise ValueError("no")

    rig.own.save("a", DATA)
    assert rig.loader.try_load(place_at("http://a"), fail)
    assert isinstance(rig.load(place_at(OWN_ADDRESS)), RequestSnapshot)
