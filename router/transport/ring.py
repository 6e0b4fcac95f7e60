"""A one-way ring of payloads in memory shared by two processes.

The writer owns where payloads lie and tells the reader through frame headers; the reader owns one
counter, the frames it has given back, in the first page. While nothing is outstanding the writer
starts at 0 again, so that small traffic stays in the processor's caches.

The file has no name: it is made anonymous and its descriptor travels over the Unix socket, so a
dead process leaves nothing behind.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence

import numpy as np

from configs.errors import FrameError
from router.transport.base import Bytes

ALIGNMENT = 64
"""Payload positions are multiples of this; positions in headers count in it."""
_CONTROL_BYTES = 4096


def create_ring_file(capacity_bytes: int) -> int:
    """Return the descriptor of a new anonymous file for one ring; the caller closes it."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create("latentmesh-ring", flags)
    os.ftruncate(descriptor, _CONTROL_BYTES + capacity_bytes)
    # A peer that shrank the file would end this process with SIGBUS.
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class _Ring:
    """The mapping, as both sides see it."""

    def __init__(self, descriptor: int) -> None:
        """Map a file of `create_ring_file`; the descriptor may be closed afterwards.

        Raises:
            FrameError: The file is too small to be a ring, or can still be shrunk.
        """
        num_bytes = os.fstat(descriptor).st_size
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:  # not a file that can have seals
            seals = 0
        if num_bytes <= _CONTROL_BYTES or not seals & fcntl.F_SEAL_SHRINK:
            raise FrameError(
                f"shared memory of {num_bytes} bytes with seals {seals} is no ring; "
                f"it needs more than {_CONTROL_BYTES} bytes and a seal against shrinking"
            )
        mapping = mmap.mmap(descriptor, num_bytes)
        self.capacity_bytes = num_bytes - _CONTROL_BYTES
        self.data: Bytes = np.frombuffer(mapping, np.uint8)[_CONTROL_BYTES:]
        self.view = self.data.data
        self.num_released = memoryview(mapping)[:8].cast("Q")

    def close(self) -> None:
        """Let go of the memory; it is freed with the last payload that is still looked at."""
        self.data = np.empty(0, np.uint8)
        self.view = self.data.data
        self.num_released = memoryview(bytearray(8)).cast("Q")


class RingWriter(_Ring):
    """The sending side. Owned by one thread."""

    def __init__(self, descriptor: int) -> None:
        """Map the ring; see `_Ring`."""
        super().__init__(descriptor)
        self._outstanding: deque[int] = deque()
        self._num_reclaimed = 0
        self._head = 0

    def try_write(self, parts: Sequence[Bytes], num_bytes: int) -> int | None:
        """Copy a payload into the ring and return its position, or None when there is no room.

        Raises:
            FrameError: The reader's counter is impossible.
        """
        start = self._reserve(num_bytes)
        if start is None:
            return None
        at = start
        for part in parts:
            end = at + part.nbytes
            self.view[at:end] = part.data
            at = end
        self._outstanding.append(start)
        self._head = start + num_bytes + -num_bytes % ALIGNMENT
        return start // ALIGNMENT

    def _reserve(self, num_bytes: int) -> int | None:
        outstanding = self._outstanding
        num_released = self.num_released[0]
        if not self._num_reclaimed <= num_released <= self._num_reclaimed + len(outstanding):
            raise FrameError(
                f"the peer gave back {num_released} frames of shared memory, "
                f"{self._num_reclaimed + len(outstanding)} were sent"
            )
        while self._num_reclaimed < num_released:
            outstanding.popleft()
            self._num_reclaimed += 1
        if not outstanding:
            return 0 if num_bytes <= self.capacity_bytes else None
        head, tail = self._head, outstanding[0]
        if head <= tail:
            return head if head + num_bytes < tail else None
        if head + num_bytes <= self.capacity_bytes:
            return head
        return 0 if num_bytes < tail else None


class RingReader(_Ring):
    """The receiving side. Owned by one thread."""

    def __init__(self, descriptor: int) -> None:
        """Map the ring; see `_Ring`."""
        super().__init__(descriptor)
        self._num_received = 0
        self._num_released = 0
        self._released_early: set[int] = set()

    def receive(self, position: int, num_bytes: int) -> tuple[Bytes, int]:
        """Return the payload at `position` as a view, and the number that gives it back.

        Raises:
            FrameError: The payload would not lie within the ring.
        """
        start = position * ALIGNMENT
        if start + num_bytes > self.capacity_bytes:
            raise FrameError(
                f"a payload of {num_bytes} bytes at {start} does not fit shared memory of "
                f"{self.capacity_bytes} bytes"
            )
        self._num_received += 1
        return self.data[start : start + num_bytes], self._num_received

    def release(self, number: int) -> None:
        """Give back a payload. The writer sees an unbroken prefix of what was received."""
        if number != self._num_released + 1:
            self._released_early.add(number)
            return
        while number + 1 in self._released_early:
            number += 1
            self._released_early.discard(number)
        self._num_released = number
        # One aligned 8-byte store, long after the last read of the payload.
        self.num_released[0] = number
