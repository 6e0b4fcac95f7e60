"""A rebalance: from the load of a window and the present placement to a new one. Pure.

Each layer is priced by itself (`layer_plan.py`): it changes only if its slowest worker saves more
time within the horizon than the copies take to send. Nothing here acts; `changes` are what is to be
done.

Shapes: T steps, L MoE layers, E logical experts, D workers, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.control.layer_plan import Fleet, LayerPlan, PlanRule, plan_layer
from cluster.control.layer_state import EMPTY
from cluster.control.load_shift import count_steps_since_shift
from cluster.control.worker_slots import WorkerCapacity, plan_slots
from configs.errors import PlacementError
from configs.ids import Epoch, WorkerId
from router.placement import LayerPlacement, Placement


@dataclass(frozen=True, slots=True)
class RebalanceRule:
    """What a rebalance weighs and what it must keep."""

    expert_bytes: int
    """Of one expert of one layer."""
    bytes_per_s: float
    """At which copies are sent."""
    step_s: float
    """Time of the experts of all layers in one step, if all workers were level."""
    horizon_steps: int = 512
    """Steps that a plan is expected to hold."""
    min_copies: int = 1
    """Copies of every expert, 1 + `expert_pool.tolerate_worker_losses`."""
    is_chosen_per_step: bool = True
    """Whether the dispatcher splits each step by its load (`router/replica_choice.py`)."""
    quantile: float | None = None
    """Of the steps' times, 0..1, that is to be low; None takes their mean."""


@dataclass(frozen=True, slots=True)
class ExpertCopy:
    """A copy of an expert on a worker."""

    layer: int
    expert: int
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class LayerChange:
    """What changes in a layer."""

    placement: LayerPlacement
    """The new one; its epoch is the next."""
    added: tuple[ExpertCopy, ...]
    removed: tuple[ExpertCopy, ...]
    par_before: float
    """Time of the slowest worker over that of level ones; infinite if a copy was missing."""
    par_after: float
    gain_s: float
    """Within the horizon; infinite if a copy was missing or a budget exceeded."""
    cost_s: float


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """The changes, most worth first. Without any, the placement is held."""

    changes: tuple[LayerChange, ...]
    num_steps: int
    """Of the window that count: those since the load last shifted."""
    reasons: tuple[str, ...]
    """Why so, for people."""

    @property
    def is_hold(self) -> bool:
        """Whether nothing changes."""
        return not self.changes

    @property
    def num_moves(self) -> int:
        """Copies to send."""
        return sum(len(change.added) for change in self.changes)

    @property
    def gain_s(self) -> float:
        """Time saved within the horizon."""
        return sum(change.gain_s for change in self.changes)

    @property
    def cost_s(self) -> float:
        """Time that the copies take."""
        return sum(change.cost_s for change in self.changes)


def plan_rebalance(
    load_TLE: NDArray[np.number],
    placement: Placement,
    workers: Sequence[WorkerCapacity],
    rule: RebalanceRule,
) -> RebalancePlan:
    """Plan the next placement.

    Args:
        load_TLE: Picks per step, oldest first; layers as in `placement.layer_ids`. Without steps
            nothing changes, unless a copy is missing.
        placement: The present one. Copies on workers that are not named are lost.
        workers: All expert workers that are to hold experts.
        rule: Prices and limits.

    Returns:
        The same for the same arguments.

    Raises:
        PlacementError: The window does not fit the placement or is no count, or the workers cannot
            hold what they must (`plan_slots`).
    """
    _check_window(load_TLE, placement)
    num_layers, num_experts = load_TLE.shape[1:]
    slots_LD = plan_slots(
        workers,
        expert_bytes=rule.expert_bytes,
        num_layers=num_layers,
        num_experts=num_experts,
        min_copies=rule.min_copies,
    )
    is_empty = len(load_TLE) == 0
    window = np.zeros((1, num_layers, num_experts), np.int64) if is_empty else load_TLE
    num_steps = count_steps_since_shift(window)
    window = window[-num_steps:]
    layer_rule = _layer_rule(rule, num_layers)
    names = {one.worker for one in workers}
    changes = []
    for at, placed in enumerate(placement.layers):
        fleet = _fleet(workers, slots_LD[at])
        slots_DS = slots_of(placed, workers, fleet.capacity_D)
        is_stale = any(not names.issuperset(holders) for holders in placed.holders)
        plan = plan_layer(window[:, at], slots_DS, fleet, layer_rule, is_stale=is_stale)
        if plan is not None:
            changes.append(_change(placed, plan, workers))
    changes.sort(key=lambda change: (change.cost_s - change.gain_s, change.placement.layer))
    reasons = _reasons(changes, slots_LD, 0 if is_empty else num_steps, rule)
    return RebalancePlan(tuple(changes), 0 if is_empty else num_steps, reasons)


def apply_changes(placement: Placement, changes: Sequence[LayerChange]) -> Placement:
    """Return the placement after all changes."""
    new = {change.placement.layer: change.placement for change in changes}
    return Placement(tuple(new.get(placed.layer, placed) for placed in placement.layers))


def slots_of(
    placed: LayerPlacement, workers: Sequence[WorkerCapacity], capacity_D: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return a layer's placement by worker and slot; copies on other workers are left out."""
    held: dict[WorkerId, list[int]] = {one.worker: [] for one in workers}
    for expert, holders in enumerate(placed.holders):
        for worker in holders:
            if worker in held:
                held[worker].append(expert)
    most = max(*(len(experts) for experts in held.values()), *capacity_D.tolist(), 1)
    slots_DS = np.full((len(workers), most), EMPTY, np.int64)
    for index, experts in enumerate(held.values()):
        slots_DS[index, : len(experts)] = experts
    return slots_DS


def _check_window(load_TLE: NDArray[np.number], placement: Placement) -> None:
    if not placement.layers:
        raise PlacementError("the placement has no layer")
    shape = (len(placement.layers), len(placement.layers[0].holders))
    if load_TLE.ndim != 3 or load_TLE.shape[1:] != shape:
        raise PlacementError(
            f"the load has shape {load_TLE.shape}; expected [steps, {shape[0]} layers, "
            f"{shape[1]} experts]"
        )
    if load_TLE.dtype.kind not in "uif":
        raise PlacementError(f"the load has type {load_TLE.dtype}; expected numbers")
    if load_TLE.dtype.kind == "f" and not np.isfinite(load_TLE).all():
        raise PlacementError("the load has values that are no numbers (NaN or infinite)")
    if load_TLE.dtype.kind != "u" and load_TLE.size and load_TLE.min() < 0:
        raise PlacementError(f"the load has negative values, the least is {load_TLE.min()}")


def _layer_rule(rule: RebalanceRule, num_layers: int) -> PlanRule:
    if rule.bytes_per_s <= 0:
        raise PlacementError(f"copies cannot be sent at {rule.bytes_per_s} bytes/s")
    return PlanRule(
        move_s=rule.expert_bytes / rule.bytes_per_s,
        level_s=rule.step_s / num_layers,
        horizon_steps=rule.horizon_steps,
        min_copies=rule.min_copies,
        is_chosen_per_step=rule.is_chosen_per_step,
        quantile=rule.quantile,
    )


def _fleet(workers: Sequence[WorkerCapacity], capacity_D: NDArray[np.int64]) -> Fleet:
    names = [one.domain if one.domain else f"worker {one.worker}" for one in workers]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return Fleet(
        capacity_D=np.ascontiguousarray(capacity_D),
        seconds_D=np.array([1.0 / one.speed for one in workers]),
        domain_D=np.array([numbers[name] for name in names], np.int64),
    )


def _change(
    placed: LayerPlacement, plan: LayerPlan, workers: Sequence[WorkerCapacity]
) -> LayerChange:
    holders: list[list[WorkerId]] = [[] for _ in placed.holders]
    for index, one in enumerate(workers):
        for expert in plan.slots_DS[index]:
            if expert != EMPTY:
                holders[expert].append(one.worker)
    added, removed = [], []
    for expert, (old, new) in enumerate(zip(placed.holders, holders, strict=True)):
        added += [ExpertCopy(placed.layer, expert, one) for one in new if one not in old]
        removed += [ExpertCopy(placed.layer, expert, one) for one in old if one not in new]
    return LayerChange(
        placement=LayerPlacement(
            placed.layer, Epoch(placed.epoch + 1), tuple(tuple(one) for one in holders)
        ),
        added=tuple(added),
        removed=tuple(removed),
        par_before=plan.par_before,
        par_after=plan.par_after,
        gain_s=plan.gain_s,
        cost_s=plan.cost_s,
    )


def _reasons(
    changes: Sequence[LayerChange], slots_LD: NDArray[np.int64], num_steps: int, rule: RebalanceRule
) -> tuple[str, ...]:
    fewest, most = int(slots_LD.sum(axis=1).min()), int(slots_LD.sum(axis=1).max())
    span = str(fewest) if fewest == most else f"{fewest} to {most}"
    reasons = [f"budgets cap a layer at {span} copies"]
    if num_steps == 0:
        reasons.append("no load was recorded")
    else:
        reasons.append(f"the load of the last {num_steps} steps counts")
    needed = sum(np.isinf(change.gain_s) for change in changes)
    if needed:
        reasons.append(f"{needed} layers lack copies or exceed a budget")
    paid = [change for change in changes if np.isfinite(change.gain_s)]
    if paid:
        gain_s, cost_s = sum(one.gain_s for one in paid), sum(one.cost_s for one in paid)
        reasons.append(
            f"{len(paid)} layers save {gain_s:.3g} s within {rule.horizon_steps} steps "
            f"for {cost_s:.3g} s of copies"
        )
    if not changes:
        reasons.append("no move pays for itself")
    return tuple(reasons)
