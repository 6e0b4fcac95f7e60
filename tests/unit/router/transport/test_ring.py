from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import FrameError
from router.transport.ring import ALIGNMENT, RingReader, RingWriter, create_ring_file
from tests.fakes.frame_making import pattern

CAPACITY = 4096
Ring = tuple[RingWriter, RingReader]


def open_ring() -> Ring:
    descriptor = create_ring_file(CAPACITY)
    try:
        return RingWriter(descriptor), RingReader(descriptor)
    finally:
        os.close(descriptor)


@pytest.fixture
def ring() -> Ring:
    return open_ring()


def write(writer: RingWriter, num_bytes: int, seed: int = 0) -> int | None:
    return writer.try_write([pattern(num_bytes, seed)], num_bytes)


def test_what_is_written_is_read_in_place(ring: Ring) -> None:
    writer, reader = ring
    position = writer.try_write([pattern(10, 1), pattern(5, 2)], 15)
    assert position == 0
    payload, _ = reader.receive(position, 15)
    assert payload.tolist() == pattern(10, 1).tolist() + pattern(5, 2).tolist()


def test_an_empty_ring_starts_at_its_beginning_again(ring: Ring) -> None:
    writer, reader = ring
    for _ in range(100):
        position = write(writer, 1000)
        assert position == 0
        reader.release(reader.receive(position, 1000)[1])


def test_a_full_ring_refuses_until_something_is_given_back(ring: Ring) -> None:
    writer, reader = ring
    first = write(writer, 2048)
    assert write(writer, 2048) is not None
    assert write(writer, 64) is None
    assert first is not None
    reader.release(reader.receive(first, 2048)[1])
    assert write(writer, 64) is not None


def test_a_payload_of_the_whole_capacity_fits_and_a_larger_one_never_does(ring: Ring) -> None:
    writer, _ = ring
    assert write(writer, CAPACITY + 1) is None
    assert write(writer, CAPACITY) == 0


def test_a_payload_given_back_early_frees_its_room_with_those_before_it(ring: Ring) -> None:
    writer, reader = ring
    positions = [write(writer, 1300) for _ in range(3)]
    numbers = [reader.receive(position, 1300)[1] for position in positions if position is not None]
    reader.release(numbers[1])
    assert write(writer, 1300) is None
    reader.release(numbers[0])
    assert write(writer, 1300) is not None


@given(st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 3)), max_size=60))
def test_unreleased_payloads_are_never_overwritten(steps: list[tuple[int, int]]) -> None:
    writer, reader = open_ring()
    held: list[tuple[np.ndarray, int, int]] = []
    for seed, (num_bytes, num_released) in enumerate(steps):
        position = write(writer, num_bytes, seed)
        if position is not None:
            payload, number = reader.receive(position, num_bytes)
            held.append((payload, number, seed))
        for payload, _, kept_seed in held:
            assert np.array_equal(payload, pattern(payload.size, kept_seed))
        for _ in range(min(num_released, len(held))):
            reader.release(held.pop(seed % len(held))[1])


def test_a_position_outside_the_ring_is_refused(ring: Ring) -> None:
    _, reader = ring
    with pytest.raises(FrameError, match="does not fit shared memory of 4096 bytes"):
        reader.receive(CAPACITY // ALIGNMENT, 1)


@pytest.mark.parametrize("counter", [1, 2**63], ids=["one-too-many", "nonsense"])
def test_a_counter_that_cannot_be_is_refused(ring: Ring, counter: int) -> None:
    writer, reader = ring
    reader.num_released[0] = counter
    with pytest.raises(FrameError, match="gave back"):
        write(writer, 8)


@pytest.fixture
def plain_file() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.truncate(100_000)
        yield file.fileno()


def test_memory_that_could_be_shrunk_is_refused() -> None:
    descriptor = os.memfd_create("latentmesh-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 100_000)
    try:
        with pytest.raises(FrameError, match="is no ring"):
            RingReader(descriptor)
    finally:
        os.close(descriptor)


def test_a_file_without_seals_is_refused(plain_file: int) -> None:
    with pytest.raises(FrameError, match="is no ring"):
        RingReader(plain_file)
