"""One shape of the benchmark, and tables of slots.

Shapes: L layers, E logical experts, D workers, S most slots of a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.errors import PlacementError

EMPTY = -1


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes, and what a move costs."""

    num_layers: int
    num_experts: int
    num_workers: int
    num_redundant: int
    """Slots per layer beyond one per expert."""
    expert_bytes: int = 88_080_384

    def __post_init__(self) -> None:
        """Refuse what cannot be placed."""
        for name in ("num_layers", "num_experts", "num_workers", "expert_bytes"):
            if getattr(self, name) < 1:
                raise PlacementError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.num_redundant < 0:
            raise PlacementError(
                f"{self.num_redundant} redundant slots: {-self.num_redundant} slots are missing "
                f"for one copy of each of {self.num_experts} experts"
            )

    @property
    def slots_D(self) -> NDArray[np.int64]:
        """Slots of each worker: as even as possible, the first ones have more."""
        each, left = divmod(self.num_experts + self.num_redundant, self.num_workers)
        return each + (np.arange(self.num_workers) < left).astype(np.int64)


@dataclass(frozen=True, slots=True)
class SlotTable:
    """Which expert is in which slot, in all layers. Nobody changes a table that was handed over."""

    slots_LDS: NDArray[np.int64]
    """Logical expert, or `EMPTY`."""
    shares_LDS: NDArray[np.float64]
    """Part of its expert's load that each slot serves where nothing is chosen per step."""


def equal_shares(slots_DS: NDArray[np.int64], num_experts: int) -> NDArray[np.float64]:
    """Return the same part for every slot of an expert, of one layer."""
    filled = slots_DS[slots_DS != EMPTY]
    num_E = np.bincount(filled, minlength=num_experts)
    return np.where(slots_DS == EMPTY, 0.0, 1.0 / np.maximum(num_E, 1)[slots_DS])


def make_table(slots_LDS: NDArray[np.int64], num_experts: int) -> SlotTable:
    """Return a table with equal shares."""
    shares = [equal_shares(slots_DS, num_experts) for slots_DS in slots_LDS]
    return SlotTable(slots_LDS, np.stack(shares))


def start_table(case: Case) -> SlotTable:
    """Experts in order; what a worker has beyond repeats its last expert."""
    slots_D = case.slots_D
    experts_D = np.full(case.num_workers, case.num_experts // case.num_workers)
    experts_D[: case.num_experts % case.num_workers] += 1
    slots_DS = np.full((case.num_workers, int(slots_D.max())), EMPTY, np.int64)
    first = 0
    for worker, num in enumerate(experts_D.tolist()):
        slots_DS[worker, :num] = np.arange(first, first + num)
        if num:
            slots_DS[worker, num : slots_D[worker]] = first + num - 1
        first += num
    table = np.repeat(slots_DS[None], case.num_layers, axis=0)
    return make_table(table, case.num_experts)
