"""Our planner as a policy of the benchmark.

Shapes: T steps, L layers, E logical experts, D workers, S slots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.case import Case, SlotTable, equal_shares
from benchmarks.placement.policy import Switch
from benchmarks.placement.simulate import BYTES_PER_S, LEVEL_S
from cluster.control.layer_plan import Fleet, PlanRule, plan_layer
from cluster.control.load_shift import count_steps_since_shift

RULE_STEPS = 8192
"""Steps of a trace by the rule, over which its time is spread."""
HISTORY_STEPS = 128
MEMORY_STEPS = 512
"""Steps of the same load that the usual load is averaged over, most; more forget short spikes."""


class FabricPolicy:
    """Looks at the load every `window_steps`, and at no more than `HISTORY_STEPS` of it."""

    def __init__(self, case: Case, *, name: str, num_choosers: int, window_steps: int = 32) -> None:
        """Start without history.

        Args:
            case: Sizes and prices.
            name: As in reports.
            num_choosers: Attention workers that split each step; 0 plans for fixed shares.
            window_steps: New steps after which it looks again.
        """
        self.name = name
        self.num_choosers = num_choosers
        self.window_steps = window_steps
        self.sees_next = False
        self._case = case
        self._history: NDArray[np.integer] | None = None
        self._usual_LE = np.zeros((case.num_layers, case.num_experts))
        self._num_usual = 0
        self._fleet = Fleet(
            capacity_D=case.slots_D,
            seconds_D=np.ones(case.num_workers),
            domain_D=np.arange(case.num_workers),
        )
        self._rule = PlanRule(
            move_s=case.expert_bytes / BYTES_PER_S,
            level_s=LEVEL_S / RULE_STEPS / case.num_layers,
            is_chosen_per_step=num_choosers > 0,
        )

    def plan(self, load_TLE: NDArray[np.integer], present: SlotTable) -> Switch | None:
        """See `Policy`."""
        history = self._remember(load_TLE)
        slots_LDS, shares_LDS = present.slots_LDS.copy(), present.shares_LDS.copy()
        worth: list[tuple[float, int]] = []
        for layer in range(self._case.num_layers):
            load_TE = history[:, layer]
            plan = plan_layer(
                load_TE,
                slots_LDS[layer],
                self._fleet,
                self._rule,
                weight_E=self._usual_LE[layer],
            )
            if plan is not None:
                slots_LDS[layer] = plan.slots_DS
                shares_LDS[layer] = equal_shares(plan.slots_DS, self._case.num_experts)
                worth.append((plan.cost_s - plan.gain_s, layer))
        if not worth:
            return None
        order = np.array([layer for _, layer in sorted(worth)], np.int64)
        return Switch(SlotTable(slots_LDS, shares_LDS), order)

    def _remember(self, load_TLE: NDArray[np.integer]) -> NDArray[np.integer]:
        """Take new steps in; return the last ones with the load of the present."""
        known = 0 if self._history is None else len(self._history)
        history = load_TLE if self._history is None else np.concatenate([self._history, load_TLE])
        num_present = count_steps_since_shift(history)
        self._history = history = history[-num_present:][-HISTORY_STEPS:]
        if num_present < known + len(load_TLE) or self._num_usual == 0:
            # The load has shifted: what was before is no guide.
            self._usual_LE = history.mean(axis=0, dtype=np.float64)
            self._num_usual = len(history)
            return history
        share = len(load_TLE) / (self._num_usual + len(load_TLE))
        self._usual_LE += share * (load_TLE.mean(axis=0, dtype=np.float64) - self._usual_LE)
        self._num_usual = min(MEMORY_STEPS, self._num_usual + len(load_TLE))
        return history
