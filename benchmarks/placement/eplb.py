"""Baselines, as they were published, in plain numpy.

- `none`: no redundant slot is used.
- `eplb`: the greedy of DeepSeek's EPLB (github.com/deepseek-ai/EPLB): copies go to the expert with
  the most load per copy, then the heaviest copy to the least loaded worker with a free slot.
- `flash_lb`: the same for mean + 0.674 standard deviations, the upper quartile of a normal load
  (the idea of FlashLB in vLLM-Ascend).
- `oracle`: `eplb` told the next window. What reacting at once would give; no floor for placing.

Shapes: T steps, L layers, E logical experts, D workers, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.case import EMPTY, Case, SlotTable, make_table
from benchmarks.placement.policy import Switch

UPPER_QUARTILE = 0.674


def replicate(weight_E: NDArray[np.float64], num_slots: int) -> NDArray[np.int64]:
    """Return copies per expert: each slot beyond one per expert goes to the heaviest per copy."""
    num_E = np.ones(weight_E.size, np.int64)
    for _ in range(num_slots - weight_E.size):
        num_E[np.argmax(weight_E / num_E)] += 1
    return num_E


def pack(
    weight_E: NDArray[np.float64], num_E: NDArray[np.int64], slots_D: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return slots `[D, S]`: the heaviest copy goes to the least loaded worker with a free slot."""
    expert_C = np.repeat(np.arange(weight_E.size), num_E)
    load_C = (weight_E / num_E)[expert_C]
    slots_DS = np.full((slots_D.size, int(slots_D.max())), EMPTY, np.int64)
    load_D, used_D = np.zeros(slots_D.size), np.zeros(slots_D.size, np.int64)
    for copy in np.argsort(-load_C, kind="stable"):
        worker = int(np.argmin(np.where(used_D < slots_D, load_D, np.inf)))
        slots_DS[worker, used_D[worker]] = expert_C[copy]
        used_D[worker] += 1
        load_D[worker] += load_C[copy]
    return slots_DS


@dataclass(frozen=True)
class Eplb:
    """Places all layers anew after every window."""

    case: Case
    name: str = "eplb"
    window_steps: int = 1024
    num_deviations: float = 0.0
    sees_next: bool = False
    num_choosers: int = 0

    def plan(self, load_TLE: NDArray[np.integer], present: SlotTable) -> Switch:
        """See `Policy`."""
        window = load_TLE[-self.window_steps :]
        weight_LE = window.mean(axis=0, dtype=np.float64)
        if self.num_deviations:
            weight_LE += self.num_deviations * window.std(axis=0, dtype=np.float64)
        slots_D = self.case.slots_D
        slots_LDS = np.full_like(present.slots_LDS, EMPTY)
        for layer, weight_E in enumerate(weight_LE):
            slots_LDS[layer] = pack(weight_E, replicate(weight_E, int(slots_D.sum())), slots_D)
        return Switch(make_table(slots_LDS, self.case.num_experts), np.arange(len(slots_LDS)))


@dataclass(frozen=True)
class Static:
    """Never plans."""

    name: str = "none"
    window_steps: int = 1 << 30
    sees_next: bool = False
    num_choosers: int = 0

    def plan(self, load_TLE: NDArray[np.integer], present: SlotTable) -> None:
        """See `Policy`."""
