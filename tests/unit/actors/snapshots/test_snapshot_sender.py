"""Copies on their way out: to the first place that takes them, and every end is told once."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import SnapshotPlace
from actors.snapshots.codec import decode_snapshot, encode_snapshot
from actors.snapshots.folder import FolderVault
from actors.snapshots.memory import MemoryVault
from actors.snapshots.sender import Destination, SnapshotSender
from actors.snapshots.server import VaultServer
from configs.errors import ServingError, SnapshotError, TransportError
from configs.ids import WorkerId
from model.cache import SlotCopy
from tests.fakes.snapshots import make_snapshot, same_bits
from tests.fakes.stalling_vault import StallingVault
from tests.fakes.vault_process import stalling_vault_process

WAIT_S = 30.0


class Ends:
    """What `done` was called with, in order."""

    def __init__(self) -> None:
        self._ends: queue.SimpleQueue[SnapshotPlace | ServingError] = queue.SimpleQueue()
        self.take = self._ends.put

    def next(self) -> SnapshotPlace | ServingError:
        return self._ends.get(timeout=WAIT_S)

    def place(self) -> SnapshotPlace:
        end = self.next()
        assert isinstance(end, SnapshotPlace), end
        return end

    def error(self) -> ServingError:
        end = self.next()
        assert isinstance(end, ServingError), end
        return end

    def is_empty(self) -> bool:
        return self._ends.empty()


@contextmanager
def sender_to(
    *destinations: Destination, timeout_s: float = WAIT_S, max_pending_bytes: int = 1 << 30
) -> Iterator[SnapshotSender]:
    sender = SnapshotSender(
        "test",
        destinations=lambda: destinations,
        timeout_s=timeout_s,
        max_pending_bytes=max_pending_bytes,
        max_folder_bytes=1 << 26,
    )
    try:
        yield sender
    finally:
        sender.close()
        assert not sender._thread.is_alive()


@contextmanager
def vault_at(worker: str, max_bytes: int = 1 << 20) -> Iterator[tuple[MemoryVault, Destination]]:
    vault = MemoryVault(max_bytes)
    server = VaultServer(vault)
    try:
        yield vault, Destination(server.start(), WorkerId(worker))
    finally:
        server.close()


def folder_at(path: Path) -> Destination:
    return Destination(f"folder:{path}", WorkerId(""))


def large_snapshot() -> RequestSnapshot:
    """More than sockets hold on their way."""
    small = make_snapshot(4)
    state = torch.zeros(4 << 20)
    return RequestSnapshot(
        "model", 2, small.token_ids_T, SlotCopy(state, state[:0]), small.tokens_MTC
    )


def test_a_copy_arrives_in_another_workers_memory() -> None:
    snapshot, ends = make_snapshot(5), Ends()
    with vault_at("attention-1") as (vault, there), sender_to(there) as sender:
        assert sender.bytes_per_s is None
        assert sender.try_send(snapshot, "a", ends.take)
        place = ends.place()
        data = vault.load("a")
        assert same_bits(decode_snapshot(data), snapshot)
        assert place == SnapshotPlace(there.address, "a", 5, len(data), WorkerId("attention-1"))
        assert (sender.num_sent, sender.num_failed, sender.sent_bytes) == (1, 0, len(data))
        assert sender.bytes_per_s is not None


def test_a_copy_arrives_in_a_folder(tmp_path: Path) -> None:
    snapshot, ends = make_snapshot(5), Ends()
    with sender_to(folder_at(tmp_path / "new")) as sender:
        assert sender.try_send(snapshot, "a", ends.take)
        place = ends.place()
    assert (place.address, place.worker) == (f"folder:{tmp_path / 'new'}", "")
    data = FolderVault(tmp_path / "new", max_bytes=0).load("a", num_bytes=place.num_bytes)
    assert same_bits(decode_snapshot(data), snapshot)


def test_a_full_or_absent_vault_is_passed_over() -> None:
    ends = Ends()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = Destination(f"tcp:127.0.0.1:{listener.getsockname()[1]}", WorkerId("gone"))
    with (
        vault_at("tiny", max_bytes=10) as (_, tiny),
        vault_at("good") as (_, good),
        sender_to(gone, tiny, good) as sender,
    ):
        assert sender.try_send(make_snapshot(), "a", ends.take)
        assert ends.place().worker == "good"


def test_a_vault_that_stalls_leaves_time_for_the_next() -> None:
    ends = Ends()
    with StallingVault() as vault, vault_at("good", max_bytes=1 << 26) as (_, good):
        stalled = Destination(vault.address, WorkerId("stalled"))
        with sender_to(stalled, good, timeout_s=4.0) as sender:
            assert sender.try_send(large_snapshot(), "a", ends.take)
            assert ends.place().worker == "good"
            assert vault.is_in_transfer.is_set()


def test_a_vault_killed_in_the_middle_is_an_error_or_the_next_ones_turn(tmp_path: Path) -> None:
    for others in ([], [folder_at(tmp_path)]):
        ends = Ends()
        with (
            stalling_vault_process() as (process, address),
            sender_to(Destination(address, WorkerId("killed")), *others) as sender,
        ):
            assert sender.try_send(large_snapshot(), "a", ends.take)
            assert process.stdout is not None
            assert process.stdout.readline() == "in transfer\n"
            process.kill()
            if others:
                assert ends.place().address.startswith("folder:")
            else:
                assert isinstance(ends.error(), TransportError)
            assert sender.num_failed == (not others)


def test_nowhere_to_go_is_an_error() -> None:
    ends = Ends()
    with sender_to() as sender:
        assert sender.try_send(make_snapshot(), "a", ends.take)
        assert isinstance(ends.error(), SnapshotError)


def test_a_bad_name_is_an_error() -> None:
    ends = Ends()
    with vault_at("good") as (_, good), sender_to(good) as sender:
        assert sender.try_send(make_snapshot(), "../a", ends.take)
        assert isinstance(ends.error(), SnapshotError)


def test_what_waits_is_bounded_by_bytes() -> None:
    ends, snapshot = Ends(), make_snapshot()
    size = snapshot.num_bytes
    with StallingVault() as vault:
        stalled = Destination(vault.address, WorkerId("stalled"))
        with sender_to(stalled, max_pending_bytes=2 * size) as sender:
            assert not sender.try_send(large_snapshot(), "large", ends.take)
            assert sender.try_send(snapshot, "a", ends.take)
            assert vault.is_in_transfer.wait(WAIT_S)
            assert sender.try_send(snapshot, "b", ends.take)
            assert not sender.try_send(snapshot, "c", ends.take)
        assert [isinstance(ends.next(), ServingError) for _ in range(2)] == [True, True]
        assert ends.is_empty()


def test_room_is_free_again_after_each_end() -> None:
    ends, snapshot = Ends(), make_snapshot()
    with (
        vault_at("good") as (_, good),
        sender_to(good, max_pending_bytes=snapshot.num_bytes) as sender,
    ):
        for number in range(3):
            assert sender.try_send(snapshot, f"a{number}", ends.take)
            ends.place()


def test_closing_in_the_middle_tells_every_end_once_and_at_once() -> None:
    ends = Ends()
    with StallingVault() as vault:
        stalled = Destination(vault.address, WorkerId("stalled"))
        with sender_to(stalled, timeout_s=3600.0) as sender:
            assert sender.try_send(large_snapshot(), "a", ends.take)
            assert sender.try_send(make_snapshot(), "b", ends.take)
            assert vault.is_in_transfer.wait(WAIT_S)
            sender.close()
            sender.close()
            assert not sender.try_send(make_snapshot(), "c", ends.take)
            assert sender.num_failed == 2
        assert [isinstance(ends.next(), ServingError) for _ in range(2)] == [True, True]
        assert ends.is_empty()


def test_what_cannot_be_encoded_is_an_error_and_the_next_goes_on() -> None:
    ends, good_one = Ends(), make_snapshot()
    bad = RequestSnapshot("m", 1, np.zeros(1, np.int32), good_one.slot, torch.zeros(1, 1, 1).bool())
    with vault_at("good") as (_, good), sender_to(good) as sender:
        assert sender.try_send(bad, "bad", ends.take)
        assert sender.try_send(good_one, "a", ends.take)
        assert "bool" in ends.error().message
        assert ends.place().num_bytes == len(encode_snapshot(good_one))


def test_who_fails_to_take_an_end_does_not_stop_the_others() -> None:
    ends = Ends()

    def fail(_: SnapshotPlace | ServingError) -> None:
        raise ValueError("no")

    with vault_at("good") as (_, good), sender_to(good) as sender:
        assert sender.try_send(make_snapshot(), "a", fail)
        assert sender.try_send(make_snapshot(), "b", ends.take)
        assert ends.place().name == "b"


def test_ends_come_from_the_senders_thread() -> None:
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    with sender_to() as sender:
        sender.try_send(make_snapshot(), "a", lambda _: names.put(threading.current_thread().name))
        assert names.get(timeout=WAIT_S) == "test-sender"
