"""The placement of one layer while a plan is made, as arrays that compiled functions change.

An expert's load counts in equal parts at its copies. Copies join workers to components: load can
flow between workers of one component at every step (`router/replica_choice.py`).

Shapes: E logical experts, D workers, S most slots of a worker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.compiled import compiled

EMPTY = -1


class LayerState(NamedTuple):
    """Who holds what. Changed in place by the functions of this module, by nobody else."""

    slots_DS: NDArray[np.int64]
    """Logical expert in each slot, or `EMPTY`; on one worker each expert once."""
    capacity_D: NDArray[np.int64]
    """Slots that each worker may use: the first ones."""
    weight_E: NDArray[np.float64]
    """Load of each expert."""
    seconds_D: NDArray[np.float64]
    """Time of each worker for one unit of load."""
    domain_D: NDArray[np.int64]
    """Failure domain of each worker."""
    is_held_ED: NDArray[np.bool_]
    num_E: NDArray[np.int64]
    """Copies of each expert."""
    num_free_D: NDArray[np.int64]
    load_D: NDArray[np.float64]
    parent_D: NDArray[np.int64]
    """Components, as a forest of union-find."""


def make_state(
    slots_DS: NDArray[np.int64],
    *,
    capacity_D: NDArray[np.int64],
    weight_E: NDArray[np.float64],
    seconds_D: NDArray[np.float64],
    domain_D: NDArray[np.int64],
) -> LayerState:
    """Return the state of a placement; `slots_DS` is copied.

    A second copy on the same worker and what lies beyond a worker's capacity are left out.
    """
    num_workers, num_experts = slots_DS.shape[0], weight_E.size
    state = LayerState(
        slots_DS=np.full(slots_DS.shape, EMPTY, np.int64),
        capacity_D=capacity_D,
        weight_E=weight_E,
        seconds_D=seconds_D,
        domain_D=domain_D,
        is_held_ED=np.zeros((num_experts, num_workers), np.bool_),
        num_E=np.zeros(num_experts, np.int64),
        num_free_D=capacity_D.copy(),
        load_D=np.zeros(num_workers),
        parent_D=np.arange(num_workers),
    )
    _fill_in(slots_DS, state)
    return state


def copy_state(state: LayerState) -> LayerState:
    """Return a state that changes by itself."""
    return state._replace(
        slots_DS=state.slots_DS.copy(),
        is_held_ED=state.is_held_ED.copy(),
        num_E=state.num_E.copy(),
        num_free_D=state.num_free_D.copy(),
        load_D=state.load_D.copy(),
        parent_D=state.parent_D.copy(),
    )


@compiled
def _fill_in(slots_DS: NDArray[np.int64], state: LayerState) -> None:
    for worker in range(slots_DS.shape[0]):
        for slot in range(min(slots_DS.shape[1], state.capacity_D[worker])):
            expert = slots_DS[worker, slot]
            if expert != EMPTY and not state.is_held_ED[expert, worker]:
                state.slots_DS[worker, slot] = expert
                state.is_held_ED[expert, worker] = True
                state.num_E[expert] += 1
                state.num_free_D[worker] -= 1
    for worker in range(slots_DS.shape[0]):
        for expert in state.slots_DS[worker]:
            if expert != EMPTY:
                state.load_D[worker] += state.weight_E[expert] / state.num_E[expert]
    find_components(state)


@compiled
def root_of(state: LayerState, worker: int) -> int:
    """Return the worker that stands for the component of `worker`."""
    while state.parent_D[worker] != worker:
        state.parent_D[worker] = state.parent_D[state.parent_D[worker]]
        worker = state.parent_D[worker]
    return worker


@compiled
def _join(state: LayerState, first: int, second: int) -> None:
    a, b = root_of(state, first), root_of(state, second)
    state.parent_D[max(a, b)] = min(a, b)


@compiled
def find_components(state: LayerState) -> None:
    """Find the components anew, after a copy was removed."""
    for worker in range(state.parent_D.size):
        state.parent_D[worker] = worker
    first_E = np.full(state.num_E.size, -1, np.int64)
    for worker in range(state.parent_D.size):
        for expert in state.slots_DS[worker]:
            if expert == EMPTY or state.num_E[expert] < 2:
                continue
            if first_E[expert] < 0:
                first_E[expert] = worker
            else:
                _join(state, first_E[expert], worker)


@compiled
def add_copy(state: LayerState, expert: int, worker: int) -> None:
    """Give `worker`, which has a free slot and no copy, a copy of `expert`."""
    slot = 0
    while state.slots_DS[worker, slot] != EMPTY:
        slot += 1
    before = state.weight_E[expert] / max(state.num_E[expert], 1)
    state.num_E[expert] += 1
    after = state.weight_E[expert] / state.num_E[expert]
    for other in range(state.load_D.size):
        if state.is_held_ED[expert, other]:
            state.load_D[other] += after - before
            _join(state, other, worker)
    state.load_D[worker] += after
    state.is_held_ED[expert, worker] = True
    state.slots_DS[worker, slot] = expert
    state.num_free_D[worker] -= 1


@compiled
def remove_copy(state: LayerState, expert: int, worker: int) -> None:
    """Take the copy of `expert` from `worker`. Components are left as they were."""
    for slot in range(state.slots_DS.shape[1]):
        if state.slots_DS[worker, slot] == expert:
            state.slots_DS[worker, slot] = EMPTY
    before = state.weight_E[expert] / state.num_E[expert]
    state.num_E[expert] -= 1
    state.load_D[worker] -= before
    state.is_held_ED[expert, worker] = False
    state.num_free_D[worker] += 1
    if state.num_E[expert] == 0:
        return
    after = state.weight_E[expert] / state.num_E[expert]
    for other in range(state.load_D.size):
        if state.is_held_ED[expert, other]:
            state.load_D[other] += after - before


@compiled
def swap_copies(state: LayerState, first: int, slot: int, second: int, other_slot: int) -> None:
    """Exchange the experts of two slots of two workers that do not hold them yet."""
    a, b = state.slots_DS[first, slot], state.slots_DS[second, other_slot]
    gain = state.weight_E[a] / state.num_E[a] - state.weight_E[b] / state.num_E[b]
    state.load_D[first] -= gain
    state.load_D[second] += gain
    state.is_held_ED[a, first] = False
    state.is_held_ED[b, second] = False
    state.is_held_ED[a, second] = True
    state.is_held_ED[b, first] = True
    state.slots_DS[first, slot] = b
    state.slots_DS[second, other_slot] = a


@compiled
def time_of(state: LayerState, worker: int) -> float:
    """Return the time that a worker takes for its load."""
    return float(state.load_D[worker] * state.seconds_D[worker])


@compiled
def has_copy_in_domain(state: LayerState, expert: int, worker: int, leaving: int) -> bool:
    """Whether another worker than `leaving` in the domain of `worker` holds a copy."""
    for other in range(state.load_D.size):
        if (
            state.is_held_ED[expert, other]
            and other != leaving
            and state.domain_D[other] == state.domain_D[worker]
        ):
            return True
    return False
