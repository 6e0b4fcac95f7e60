"""Reusable receive buffers, so that large frames do not fault in fresh pages every time."""

from __future__ import annotations

import numpy as np

from router.transport.base import Bytes

_MIN_BYTES = 1 << 12
_KEPT_PER_SIZE = 4


class BufferPool:
    """Free byte buffers by power-of-two size. Owned by one link and thread."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}

    def take(self, num_bytes: int) -> Bytes:
        """Return a buffer of at least `num_bytes`; its contents are undefined."""
        size = max(_MIN_BYTES, 1 << (num_bytes - 1).bit_length())
        free = self._free.get(size)
        if free:
            return free.pop()
        return np.empty(size, np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """Keep a buffer from `take` for later; some are kept per size, the rest is freed."""
        free = self._free.setdefault(buffer.nbytes, [])
        if len(free) < _KEPT_PER_SIZE:
            free.append(buffer)
