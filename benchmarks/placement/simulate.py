"""The rule: one policy on one trace.

Shapes: T steps, L layers, E logical experts, D workers, S slots.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.case import EMPTY, Case, SlotTable, make_table, start_table
from benchmarks.placement.measure import chosen_pars, fixed_pars
from benchmarks.placement.policy import Policy, Switch
from cluster.control.layer_plan import find_copies

PLANNING_STEP_S = 0.08
"""A plan comes into force a step later for each so many seconds that it took."""
LEVEL_S = 60.0
"""Time of the whole trace if all workers were level."""
BYTES_PER_S = 9e11


@dataclass(slots=True)
class Outcome:
    """What came of a policy."""

    policy: str
    num_choosers: int
    pars_TL: NDArray[np.float64]
    """Peak over average."""
    num_moves: int = 0
    plan_s: list[float] = field(default_factory=list)
    samples: list[tuple[int, int, NDArray[np.int64]]] = field(default_factory=list)
    """(step, layer, its slots then), for the exact program."""
    last_slots_LDS: NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0, 0), np.int64))
    """At the end."""

    def model_s(self, case: Case) -> float:
        """Time by the rule: the steps' and the moves'."""
        move_s = case.expert_bytes / BYTES_PER_S
        return LEVEL_S * float(self.pars_TL.mean()) + self.num_moves * move_s


def count_moves(before_DS: NDArray[np.int64], after_DS: NDArray[np.int64]) -> int:
    """Return slots of one layer whose expert is another one; order within a worker is free."""
    num_moves = 0
    for before, after in zip(before_DS, after_DS, strict=True):
        left = before[before != EMPTY].tolist()
        for expert in after[after != EMPTY].tolist():
            if expert in left:
                left.remove(expert)
            else:
                num_moves += 1
    return num_moves


class Simulation:
    """Runs one policy."""

    def __init__(
        self,
        policy: Policy,
        case: Case,
        load_TLE: NDArray[np.number],
        *,
        sampled: frozenset[tuple[int, int]] = frozenset(),
        on_steps: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Take the trace; zeros count as one.

        Args:
            policy: Asked for plans.
            case: Its sizes fit the trace.
            load_TLE: Picks of each step.
            sampled: (step, layer) whose slots are kept in `Outcome.samples`.
            on_steps: Told how many more steps are done.
        """
        self._policy = policy
        self._case = case
        self._load_TLE = load_TLE
        self._sampled = sampled
        self._on_steps = on_steps
        self._table = start_table(case)
        if policy.name == "none":
            self._table = _without_redundant(self._table, case)
        self._outcome = Outcome(
            policy.name, policy.num_choosers, np.empty(load_TLE.shape[:2], np.float64)
        )

    def run(self) -> Outcome:
        """Run all steps."""
        num_steps = len(self._load_TLE)
        step, asked_at = 0, 0
        while step < num_steps:
            step = self._measure(step, min(num_steps, asked_at + self._policy.window_steps))
            if step == num_steps:
                break
            new = self._seen(asked_at, step)
            asked_at = step
            began = time.perf_counter()
            switch = self._policy.plan(new, self._table)
            took_s = time.perf_counter() - began
            self._outcome.plan_s.append(took_s)
            if switch is not None:
                delay = math.ceil(took_s / PLANNING_STEP_S)
                step = self._measure(step, min(num_steps, step + delay))
                step = self._apply(switch, step)
        self._outcome.last_slots_LDS = self._table.slots_LDS
        return self._outcome

    def _seen(self, asked_at: int, step: int) -> NDArray[np.integer]:
        if self._policy.sees_next:
            new = self._load_TLE[step : step + self._policy.window_steps]
        else:
            new = self._load_TLE[asked_at:step]
        dtype = new.dtype if new.dtype.kind == "u" else np.dtype(np.uint32)
        counted: NDArray[np.integer] = np.maximum(new, 1).astype(dtype)
        return counted

    def _apply(self, switch: Switch, step: int) -> int:
        """Switch one layer per step; return the step after the last."""
        slots_LDS, shares_LDS = self._table.slots_LDS.copy(), self._table.shares_LDS.copy()
        for layer in switch.layers.tolist():
            if step == len(self._load_TLE):
                break
            new_DS = switch.table.slots_LDS[layer]
            self._outcome.num_moves += count_moves(slots_LDS[layer], new_DS)
            slots_LDS[layer], shares_LDS[layer] = new_DS, switch.table.shares_LDS[layer]
            self._table = SlotTable(slots_LDS, shares_LDS)
            step = self._measure(step, step + 1)
        return step

    def _measure(self, start: int, stop: int) -> int:
        """Measure steps under the present table; return where it stopped, never before `start`."""
        if stop <= start:
            return start
        num_choosers = self._policy.num_choosers
        for layer in range(self._case.num_layers):
            load_TE = np.ascontiguousarray(self._load_TLE[start:stop, layer])
            if load_TE.dtype.kind == "f":
                load_TE = np.rint(load_TE).astype(np.uint32)
            pars_T = np.empty(stop - start)
            slots_DS = self._table.slots_LDS[layer]
            if num_choosers:
                seconds_D = np.ones(self._case.num_workers)
                copies = find_copies(slots_DS, seconds_D, self._case.num_experts)
                chosen_pars(load_TE, copies, num_choosers, start + 7919 * layer, pars_T)
            else:
                fixed_pars(load_TE, slots_DS, self._table.shares_LDS[layer], pars_T)
            self._outcome.pars_TL[start:stop, layer] = pars_T
        for step, layer in self._sampled:
            if start <= step < stop:
                slots = self._table.slots_LDS[layer].copy()
                self._outcome.samples.append((step, layer, slots))
        self._on_steps(stop - start)
        return stop


def _without_redundant(table: SlotTable, case: Case) -> SlotTable:
    slots_LDS = table.slots_LDS.copy()
    for slots_DS in slots_LDS:
        for slots_S in slots_DS:
            _, first = np.unique(slots_S, return_index=True)
            again = np.ones(slots_S.size, np.bool_)
            again[first] = False
            slots_S[again] = EMPTY
    return make_table(slots_LDS, case.num_experts)
