"""Copies in memory and in a folder: bounded, whole or not there, nothing outside the folder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.snapshots import folder as folder_module
from actors.snapshots.folder import PART_AGE_S, FolderVault
from actors.snapshots.memory import MemoryVault
from configs.errors import SnapshotError

BAD_NAMES = ["", "a/b", "../a", "a\0", "a\n", "a b", "ä", "x" * 201]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["save", "reserve", "release", "drop"]),
            st.sampled_from("abcd"),
            st.integers(0, 12),
        ),
        max_size=40,
    )
)
def test_memory_is_never_above_its_limit(actions: list[tuple[str, str, int]]) -> None:
    vault = MemoryVault(20)
    reserved: list[int] = []
    for action, name, size in actions:
        try:
            if action == "save":
                vault.save(name, bytes(size))
            elif action == "reserve":
                vault.reserve(size)
                reserved.append(size)
            elif action == "release" and reserved:
                vault.release(reserved.pop())
            elif action == "drop":
                vault.drop(name)
        except SnapshotError:
            assert size > 20 - sum(reserved)
        assert vault.num_bytes + sum(reserved) <= 20
        assert vault.num_bytes == sum(len(data) for data in vault._data.values())


def test_the_oldest_copy_in_memory_goes_first() -> None:
    vault = MemoryVault(10)
    for name in "abc":
        vault.save(name, bytes(4))
    with pytest.raises(SnapshotError, match="a is not in"):
        vault.load("a")
    assert vault.load("b") == vault.load("c") == bytes(4)


def test_a_copy_of_the_same_name_replaces_the_first() -> None:
    vault = MemoryVault(10)
    vault.save("a", b"12345678")
    vault.save("a", b"123456789")
    assert vault.load("a") == b"123456789"
    assert (vault.num_snapshots, vault.num_bytes) == (1, 9)


def test_what_is_larger_than_the_vault_is_refused_and_drops_nothing() -> None:
    vault = MemoryVault(10)
    vault.save("a", bytes(10))
    with pytest.raises(SnapshotError, match=r"11 bytes .* 10 .*max_stored_bytes"):
        vault.save("b", bytes(11))
    assert vault.load("a") == bytes(10)


def test_a_vault_of_nothing_refuses_everything() -> None:
    with pytest.raises(SnapshotError):
        MemoryVault(0).save("a", b"1")


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_bad_names_are_refused_everywhere(tmp_path: Path, name: str) -> None:
    folder = FolderVault(tmp_path / "vault", max_bytes=100)
    for call in (
        lambda: MemoryVault(10).save(name, b""),
        lambda: folder.save(name, b""),
        lambda: folder.load(name, num_bytes=0),
        lambda: folder.drop(name),
    ):
        with pytest.raises(SnapshotError, match="name"):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".", "..", "-", "x" * 200], ids=lambda name: name[:3])
def test_odd_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    vault = FolderVault(tmp_path / "vault", max_bytes=100)
    vault.save(name, b"data")
    assert vault.load(name, num_bytes=4) == b"data"
    assert [path.name for path in tmp_path.iterdir()] == ["vault"]
    vault.drop(name)
    vault.drop(name)
    with pytest.raises(SnapshotError, match="is not in"):
        vault.load(name, num_bytes=4)


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    vault = FolderVault(tmp_path, max_bytes=10)
    for age, name in enumerate(["new", "middle", "old"]):
        vault.save(name, bytes(3))
        os.utime(tmp_path / f"{name}.snapshot", (1e9 - age, 1e9 - age))
    vault.save("another", bytes(4))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["another", "middle", "new"]


def test_a_file_of_the_same_name_does_not_count_twice(tmp_path: Path) -> None:
    vault = FolderVault(tmp_path, max_bytes=10)
    vault.save("other", bytes(3))
    vault.save("a", bytes(7))
    vault.save("a", bytes(6))
    assert vault.load("other", num_bytes=3) == bytes(3)


def test_what_is_larger_than_the_folders_limit_is_refused(tmp_path: Path) -> None:
    vault = FolderVault(tmp_path, max_bytes=10)
    vault.save("a", bytes(10))
    with pytest.raises(SnapshotError, match="11 bytes exceeds the limit of 10"):
        vault.save("b", bytes(11))
    assert vault.load("a", num_bytes=10) == bytes(10)


def test_a_file_of_another_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    vault = FolderVault(tmp_path, max_bytes=10)
    vault.save("a", bytes(10))
    with pytest.raises(SnapshotError, match="10 bytes, 9 expected"):
        vault.load("a", num_bytes=9)


def test_leftovers_of_dead_writers_are_swept_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = folder_module._host()
    (tmp_path / f"{host}-{dead.pid}-1.part").write_bytes(b"dead")
    (tmp_path / "elsewhere-1-1.part").write_bytes(b"other machine, long ago")
    os.utime(tmp_path / "elsewhere-1-1.part", (1e9 - PART_AGE_S, 1e9 - PART_AGE_S))
    (tmp_path / f"{host}-{os.getpid()}-0.part").write_bytes(b"live")
    (tmp_path / "elsewhere-1-2.part").write_bytes(b"other machine, now")
    FolderVault(tmp_path, max_bytes=10).save("a", b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"{host}-{os.getpid()}-0.part", "a.snapshot", "elsewhere-1-2.part"]
    )


def test_a_folder_that_cannot_be_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    vault = FolderVault(tmp_path / "file" / "vault", max_bytes=10)
    for call in (
        lambda: vault.save("a", b"1"),
        lambda: vault.load("a", num_bytes=1),
        lambda: vault.drop("a"),
    ):
        with pytest.raises(SnapshotError, match=r"cannot|not in"):
            call()
    with pytest.raises(SnapshotError):
        FolderVault("a\0b", max_bytes=10).save("a", b"1")


def test_writers_of_one_name_leave_one_whole_copy(tmp_path: Path) -> None:
    copies = [bytes([value]) * 10_000 for value in range(4)]

    def write(data: bytes) -> None:
        vault = FolderVault(tmp_path, max_bytes=100_000)
        for _ in range(10):
            vault.save("a", data)

    threads = [threading.Thread(target=write, args=(data,)) for data in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert FolderVault(tmp_path, max_bytes=1).load("a", num_bytes=10_000) in copies
    assert [path.name for path in tmp_path.iterdir()] == ["a.snapshot"]
