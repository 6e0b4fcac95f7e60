"""How many tokens picked each expert in each step of an attention worker.

The engine thread counts; any thread reads rows of steps that have ended. Neither waits for the
other: the rows are a ring, and a reader copies first and then looks which rows were overwritten
meanwhile.

Shapes: L MoE layers, E logical experts, N rows of the ring, R rows that are read, P picks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.errors import PlacementError
from router.compiled import compiled

MAX_ROWS = 64
"""In one read: at K3's size 92 x 896 counts of 2 bytes, 10.6 MB."""
SMALL_TOKENS = 1 << 16
"""Steps of fewer tokens are counted in 16 bits: a token picks an expert once."""


@dataclass(frozen=True, slots=True)
class LoadRows:
    """Steps of one attention worker, oldest first."""

    counts_RLE: NDArray[np.unsignedinteger]
    """Picks."""
    ended_at_R: NDArray[np.float64]
    """Seconds since 1970."""
    layers: tuple[int, ...]
    life: float
    """When the recorder began, seconds since 1970; a new one numbers anew."""
    first: int
    """Number of the first row since the worker began; further ones follow."""
    num_dropped: int
    """Rows between the reader's place and `first` that were overwritten."""
    num_left: int
    """Rows after these."""

    @property
    def next_row(self) -> int:
        """Where to read on."""
        return self.first + len(self.ended_at_R)


class LoadRecorder:
    """Counts picks. `count`, `forget_step` and `end_step` belong to the engine thread."""

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_experts: int,
        num_rows: int,
        max_step_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Allocate the ring.

        Args:
            layers: MoE layers, ascending.
            num_experts: Of each.
            num_rows: Steps that can be read, at least 1.
            max_step_tokens: Most tokens of a step.
            clock: Seconds since 1970.
        """
        dtype = np.uint16 if max_step_tokens < SMALL_TOKENS else np.uint32
        # One row is being counted, and never read.
        shape = (num_rows + 1, len(layers), num_experts)
        self._counts_NLE: NDArray[np.unsignedinteger] = np.zeros(shape, dtype)
        self._ended_at_N = np.zeros(num_rows + 1)
        self._layers = tuple(layers)
        self._index = {layer: index for index, layer in enumerate(layers)}
        self._num_ended = 0
        self._is_touched = False
        self._clock = clock
        self._life = clock()
        # Compiles what no step should wait for.
        _add_picks(np.empty(0, np.uint32), self._counts_NLE[0, 0])

    @property
    def memory_bytes(self) -> int:
        """Of the ring."""
        return int(self._counts_NLE.nbytes)

    def count(self, layer: int, experts_P: NDArray[np.uint32]) -> None:
        """Add the picks of a dispatch to the present step; all ids are known to exist.

        Raises:
            PlacementError: The layer has no routed experts.
        """
        index = self._index.get(layer)
        if index is None:
            raise PlacementError(f"layer {layer} has no experts to count; counted: {self._layers}")
        _add_picks(experts_P, self._counts_NLE[self._num_ended % len(self._counts_NLE), index])
        self._is_touched = True

    def forget_step(self) -> None:
        """Start the present step anew."""
        if self._is_touched:
            self._counts_NLE[self._num_ended % len(self._counts_NLE)] = 0
            self._is_touched = False

    def end_step(self) -> None:
        """Make a row of the present step, unless nothing was picked in it."""
        if not self._is_touched:
            return
        self._ended_at_N[self._num_ended % len(self._counts_NLE)] = self._clock()
        self._num_ended += 1
        self._counts_NLE[self._num_ended % len(self._counts_NLE)] = 0
        self._is_touched = False

    def read(self, after: int, max_rows: int = MAX_ROWS) -> LoadRows:
        """Return rows from number `after` on. From any thread.

        Args:
            after: `LoadRows.next_row` of the last read, or 0.
            max_rows: Most rows to return, at least 1.
        """
        num_ended = self._num_ended
        oldest = max(0, num_ended - len(self._counts_NLE) + 1)
        # A place beyond the end is of another life.
        first = oldest if after > num_ended else max(after, oldest)
        stop = min(num_ended, first + max_rows)
        at_R = np.arange(first, stop) % len(self._counts_NLE)
        counts_RLE, ended_at_R = self._counts_NLE[at_R], self._ended_at_N[at_R]
        # The row after the last is being written: it is that of the oldest one.
        lost = max(0, self._num_ended - len(self._counts_NLE) + 1 - first)
        return LoadRows(
            counts_RLE=counts_RLE[lost:],
            ended_at_R=ended_at_R[lost:],
            layers=self._layers,
            life=self._life,
            first=first + min(lost, stop - first),
            num_dropped=0
            if after > num_ended
            else max(0, first + min(lost, stop - first) - max(after, 0)),
            num_left=num_ended - stop,
        )


@compiled
def _add_picks(experts_P: NDArray[np.uint32], counts_E: NDArray[np.unsignedinteger]) -> None:
    """Count in place: `np.bincount` would make two arrays per dispatch, and takes twice as long."""
    for expert in experts_P:
        counts_E[expert] += 1
