"""One layer's plan: how far to follow the search, by what it gains and what it costs.

What a placement costs per step is the time of its slowest worker. It is computed for steps of the
window themselves, so that experts that are busy together count together; with a choice per step
every one of these steps is split anew, as the dispatcher will do.

Shapes: T steps, E logical experts, D workers, S slots, R most copies of an expert, C marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.control.layer_search import SearchRule, make_trail, place_anew, search
from cluster.control.layer_state import EMPTY, LayerState, copy_state, make_state
from router.compiled import compiled
from router.copies import NOBODY, Copies
from router.replica_choice import split_load

MAX_MARKS = 48
MARKS_PER_FLEET = 4
"""The trail is marked each time a quarter as many copies as there are workers have moved."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The expert workers, as arrays; index by index the same worker."""

    capacity_D: NDArray[np.int64]
    """Slots for this layer, at most E."""
    seconds_D: NDArray[np.float64]
    """Time for one pick, in units of an ordinary worker."""
    domain_D: NDArray[np.int64]
    """Failure domain, by number."""


@dataclass(frozen=True, slots=True)
class PlanRule:
    """What a plan weighs and what it must keep."""

    move_s: float
    """Price of one more copy, seconds: its bytes over the bandwidth."""
    level_s: float
    """Time of this layer's experts in one step if all workers were level, seconds."""
    horizon_steps: int = 512
    """Steps that a plan is expected to hold."""
    min_copies: int = 1
    """Copies of every expert, 1 + `expert_pool.tolerate_worker_losses`."""
    is_chosen_per_step: bool = True
    """Whether the dispatcher splits each step by its load, or copies take equal parts always."""
    quantile: float | None = None
    """Of the times of the window's steps, 0..1; None weighs their mean."""
    num_samples: int = 16
    """Steps of the window that candidates are priced with."""
    level_tolerance: float = 0.03
    """Workers this much above the mean load are left alone."""
    copy_hysteresis: float = 0.3
    """A copy gives way to one that would serve this much more."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What is to become of a layer."""

    slots_DS: NDArray[np.int64]
    """Logical expert by worker and slot, or `EMPTY`; experts that stay keep their slots."""
    num_moves: int
    """Copies that are added."""
    par_before: float
    """Time of the slowest worker over that of level ones; infinite where a copy is missing."""
    par_after: float
    gain_s: float
    """Time saved within the horizon; infinite where a copy was missing."""
    cost_s: float


def plan_layer(
    load_TE: NDArray[np.number],
    slots_DS: NDArray[np.int64],
    fleet: Fleet,
    rule: PlanRule,
    *,
    weight_E: NDArray[np.float64] | None = None,
    is_stale: bool = False,
) -> LayerPlan | None:
    """Plan one layer.

    Args:
        load_TE: Picks of each expert in each step of the window, oldest first; not empty.
        slots_DS: Present placement.
        fleet: The workers; their slots hold `rule.min_copies` of every expert.
        rule: Prices and limits.
        weight_E: Usual picks of each expert, from more steps than these; None takes their mean.
        is_stale: Whether `slots_DS` is to be returned where nothing else pays, because it is not
            what is written down.

    Returns:
        None if nothing pays for itself.
    """
    state = make_state(
        slots_DS,
        capacity_D=fleet.capacity_D,
        weight_E=load_TE.mean(axis=0, dtype=np.float64) if weight_E is None else weight_E,
        seconds_D=fleet.seconds_D,
        domain_D=fleet.domain_D,
    )
    step = max(1, len(load_TE) // rule.num_samples)
    samples_TE = np.ascontiguousarray(load_TE[::-step][: rule.num_samples], np.float64)
    present = state.slots_DS.copy()
    is_kept = bool((state.num_E >= rule.min_copies).all()) and _fits(slots_DS, fleet)
    best = _price(present, present, samples_TE, fleet, rule) if is_kept else None
    par_before = np.inf if best is None else best.par_after
    for candidate in _candidates(state, rule):
        plan = _price(present, candidate, samples_TE, fleet, rule)
        if best is None or _total_s(plan, rule) < _total_s(best, rule):
            best = plan
    if best is None or (is_kept and best.num_moves == 0 and not is_stale):
        return None
    gain_s = (par_before - best.par_after) * rule.level_s * rule.horizon_steps
    return replace(best, par_before=par_before, gain_s=gain_s)


def step_times(
    load_TE: NDArray[np.float64], slots_DS: NDArray[np.int64], fleet: Fleet, rule: PlanRule
) -> NDArray[np.float64]:
    """Return the time of the slowest worker in each step, in picks of an ordinary worker.

    Args:
        load_TE: Picks of each expert in each step.
        slots_DS: A placement with at least one copy of every expert.
        fleet: The workers.
        rule: Whether each step is split by its load.
    """
    times_T = np.empty(len(load_TE))
    copies = find_copies(slots_DS, fleet.seconds_D, load_TE.shape[1])
    _measure_steps(load_TE, copies, rule.is_chosen_per_step, times_T)
    return times_T


def find_copies(
    slots_DS: NDArray[np.int64], seconds_D: NDArray[np.float64], num_experts: int
) -> Copies:
    """Return where the copies of every expert are; on one worker an expert counts once."""
    num_E = np.zeros(num_experts, np.int64)
    worker_ER = np.full((num_experts, _most_copies(slots_DS, num_experts)), NOBODY, np.int64)
    _collect(slots_DS, worker_ER, num_E)
    return Copies(worker_ER, num_E, np.flatnonzero(num_E > 1), seconds_D)


def _total_s(plan: LayerPlan, rule: PlanRule) -> float:
    """Seconds of the layer within the horizon, with the moves."""
    return plan.par_after * rule.level_s * rule.horizon_steps + plan.cost_s


def _price(
    present: NDArray[np.int64],
    slots_DS: NDArray[np.int64],
    samples_TE: NDArray[np.float64],
    fleet: Fleet,
    rule: PlanRule,
) -> LayerPlan:
    times_T = step_times(samples_TE, slots_DS, fleet, rule)
    time = times_T.mean() if rule.quantile is None else np.quantile(times_T, rule.quantile)
    level = samples_TE.sum() / len(samples_TE) / (1.0 / fleet.seconds_D).sum()
    num_moves = int(_count_added(present, slots_DS, samples_TE.shape[1]))
    return LayerPlan(
        slots_DS=slots_DS,
        num_moves=num_moves,
        par_before=0.0,
        par_after=float(time / level) if level > 0 else 1.0,
        gain_s=0.0,
        cost_s=num_moves * rule.move_s,
    )


def _candidates(state: LayerState, rule: PlanRule) -> Iterator[NDArray[np.int64]]:
    """Search from the state, which is changed, and return the marks of all trails."""
    search_rule = SearchRule(
        min_copies=rule.min_copies,
        copy_hysteresis=rule.copy_hysteresis,
        level_tolerance=rule.level_tolerance,
        keeps_ties=rule.is_chosen_per_step,
        mark_every=max(1, state.load_D.size // MARKS_PER_FLEET),
        spreads=False,
    )
    if bool((state.num_E >= rule.min_copies).all()):
        yield state.slots_DS.copy()
    if rule.is_chosen_per_step and int(state.num_free_D.sum()) > 0:
        trail = make_trail(MAX_MARKS, state.slots_DS)
        search(copy_state(state), search_rule._replace(spreads=True), trail)
        yield from trail.slots_CDS[: trail.num_marks[0]]
    trail = make_trail(MAX_MARKS, state.slots_DS)
    if not search(state, search_rule, trail):
        place_anew(state, rule.min_copies)
        yield state.slots_DS.copy()
        trail = make_trail(MAX_MARKS, state.slots_DS)
        search(state, search_rule, trail)
    yield from trail.slots_CDS[: trail.num_marks[0]]


def _fits(slots_DS: NDArray[np.int64], fleet: Fleet) -> bool:
    """Whether no worker holds more than its slots."""
    slot_S = np.arange(slots_DS.shape[1])
    return not ((slots_DS != EMPTY) & (slot_S >= fleet.capacity_D[:, None])).any()


@compiled
def _most_copies(slots_DS: NDArray[np.int64], num_experts: int) -> int:
    num_E = np.zeros(num_experts, np.int64)
    for expert in slots_DS.reshape(-1):
        if expert != EMPTY:
            num_E[expert] += 1
    return int(max(num_E.max(), 1))


@compiled
def _collect(
    slots_DS: NDArray[np.int64], worker_ER: NDArray[np.int64], num_E: NDArray[np.int64]
) -> None:
    for worker in range(slots_DS.shape[0]):
        for expert in slots_DS[worker]:
            if expert == EMPTY:
                continue
            if num_E[expert] == 0 or worker_ER[expert, num_E[expert] - 1] != worker:
                worker_ER[expert, num_E[expert]] = worker
                num_E[expert] += 1


@compiled
def _measure_steps(
    load_TE: NDArray[np.float64],
    copies: Copies,
    is_chosen_per_step: bool,  # noqa: FBT001 - compiled functions take arguments by position.
    times_T: NDArray[np.float64],
) -> None:
    load_D = np.empty(copies.seconds_W.size)
    part_ER = np.empty(copies.worker_ER.shape)
    for step in range(load_TE.shape[0]):
        load_D[:] = 0.0
        if is_chosen_per_step:
            split_load(load_TE[step], copies, load_D, part_ER)
        else:
            for expert in range(load_TE.shape[1]):
                for copy in range(copies.num_E[expert]):
                    load_D[copies.worker_ER[expert, copy]] += (
                        load_TE[step, expert] / copies.num_E[expert]
                    )
        times_T[step] = (load_D * copies.seconds_W).max()


@compiled
def _count_added(
    before_DS: NDArray[np.int64], after_DS: NDArray[np.int64], num_experts: int
) -> int:
    num_added = 0
    was_held_E = np.zeros(num_experts, np.bool_)
    for worker in range(before_DS.shape[0]):
        was_held_E[:] = False
        for expert in before_DS[worker]:
            if expert != EMPTY:
                was_held_E[expert] = True
        for expert in after_DS[worker]:
            if expert != EMPTY and not was_held_E[expert]:
                num_added += 1
    return num_added
