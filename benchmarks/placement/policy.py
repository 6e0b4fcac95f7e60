"""What a policy is.

Shapes: T steps, L layers, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.case import SlotTable


@dataclass(frozen=True, slots=True)
class Switch:
    """A plan: layers of `table` that replace the present ones, one per step, in this order."""

    table: SlotTable
    layers: NDArray[np.int64]


class Policy(Protocol):
    """Places experts. Knows nothing but what it is told."""

    @property
    def name(self) -> str:
        """As in reports."""

    @property
    def num_choosers(self) -> int:
        """Attention workers that split each step over the copies; 0: fixed shares (track A)."""

    @property
    def window_steps(self) -> int:
        """It is asked when there are so many new steps and its last plan has been applied."""

    @property
    def sees_next(self) -> bool:
        """Whether it is told the next window in place of the last: a floor, not a policy."""

    def plan(self, load_TLE: NDArray[np.integer], present: SlotTable) -> Switch | None:
        """Return a plan from the new steps, or None to hold."""
