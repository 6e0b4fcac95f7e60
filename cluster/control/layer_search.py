"""The search for a layer's placement: a trail of steps from the present one to a better one.

1. *Needed* copies: every expert gets as many copies as it must have.
2. *Free* slots get copies of the experts with the most load per copy (the replication rule of
   DeepSeek's EPLB), where possible in another failure domain and then in another component: copies
   are the edges of a graph of workers, and load flows along them (`router/replica_choice.py`). A
   connected graph lowers the peak more than the least loaded worker would (`docs/adr/0009`).
3. *Exchanges*: copies that serve little give way to copies of heavier experts.
4. *Swaps* of two experts between the slowest worker and another one, the best first.

How far to follow the trail is decided by its price (`layer_plan.py`). Deterministic: ties go to the
lower index.

Shapes: E logical experts, D workers, S slots, C marks of the trail.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.control.layer_state import (
    EMPTY,
    LayerState,
    add_copy,
    find_components,
    has_copy_in_domain,
    remove_copy,
    root_of,
    swap_copies,
    time_of,
)
from router.compiled import compiled

NOBODY = -1
TIE_DISCOUNT = 1.0


class SearchRule(NamedTuple):
    """What the search may do. Numbers without a unit are ratios."""

    min_copies: int
    """Copies that every expert must have."""
    copy_hysteresis: float
    """A copy gives way to one that serves this much more."""
    level_tolerance: float
    """Workers this much above the mean time are level enough."""
    keeps_ties: bool
    """Swap only experts with one copy, so that components stay; right for a choice per step."""
    mark_every: int
    """Steps between two marks of the trail."""
    spreads: bool
    """Spread the experts that are to get copies over the workers first."""


class Trail(NamedTuple):
    """Placements on the way, and how many copies each has added."""

    slots_CDS: NDArray[np.int64]
    num_moves_C: NDArray[np.int64]
    num_marks: NDArray[np.int64]
    """One number."""


def make_trail(num_marks: int, slots_DS: NDArray[np.int64]) -> Trail:
    """Return an empty trail with room for so many marks."""
    return Trail(
        slots_CDS=np.empty((num_marks, *slots_DS.shape), np.int64),
        num_moves_C=np.zeros(num_marks, np.int64),
        num_marks=np.zeros(1, np.int64),
    )


@compiled
def place_anew(state: LayerState, min_copies: int) -> None:
    """Place so many copies of every expert on workers with the most free slots, from nothing.

    That works whenever it is possible at all: each expert takes slots where most are left
    (the greedy of Gale and Ryser).
    """
    state.slots_DS[:] = EMPTY
    state.is_held_ED[:] = False
    state.num_E[:] = 0
    state.load_D[:] = 0.0
    state.num_free_D[:] = state.capacity_D
    for expert in range(state.num_E.size):
        for _ in range(min_copies):
            best, most = NOBODY, 0
            for worker in range(state.load_D.size):
                if not state.is_held_ED[expert, worker] and state.num_free_D[worker] > most:
                    best, most = worker, state.num_free_D[worker]
            if best != NOBODY:
                add_copy(state, expert, best)
    find_components(state)


@compiled
def _mark(trail: Trail, state: LayerState, num_moves: int) -> None:
    """Mark the trail; the last mark is overwritten when there is no room."""
    at = min(trail.num_marks[0], trail.num_moves_C.size - 1)
    if at > 0 and trail.num_moves_C[at - 1] == num_moves:
        return
    trail.slots_CDS[at] = state.slots_DS
    trail.num_moves_C[at] = num_moves
    trail.num_marks[0] = at + 1


@compiled
def search(state: LayerState, rule: SearchRule, trail: Trail) -> bool:
    """Improve `state` step by step and mark the trail.

    The first mark has all needed copies. If there were any, it must be followed at least.

    Returns:
        False if needed copies could not be placed one by one (`place_anew` can).
    """
    num_moves = _add_needed(state, rule)
    if num_moves < 0:
        return False
    if rule.min_copies > 1:
        num_moves += _separate(state)
    if num_moves > 0:
        _mark(trail, state, num_moves)
    if rule.spreads:
        num_moves += _spread(state)
    num_moves = _fill_free(state, rule, trail, num_moves)
    num_moves = _exchange(state, rule, trail, num_moves)
    num_moves = _swap(state, rule, trail, num_moves)
    if num_moves > 0:
        _mark(trail, state, num_moves)
    return True


@compiled
def _heaviest(state: LayerState) -> int:
    """Return the expert with the most load per copy that some worker does not hold."""
    best, most = NOBODY, -1.0
    for expert in range(state.num_E.size):
        if state.num_E[expert] < state.load_D.size:
            load = state.weight_E[expert] / max(state.num_E[expert], 1)
            if load > most:
                best, most = expert, load
    return best


@compiled
def _lightest(state: LayerState, min_copies: int, not_on: int) -> int:
    """Return the expert whose copies would carry least if one were gone.

    Args:
        state: The placement.
        min_copies: Experts with no more copies are left alone.
        not_on: Only experts of which this expert's holders do not hold every copy; `NOBODY`: all.
    """
    best, least = NOBODY, np.inf
    for expert in range(state.num_E.size):
        if state.num_E[expert] > max(min_copies, 1) and expert != not_on:
            load = state.weight_E[expert] / (state.num_E[expert] - 1)
            if load < least and (not_on == NOBODY or _place_of(state, expert, not_on) != NOBODY):
                best, least = expert, load
    return best


@compiled
def _rank(state: LayerState, expert: int, worker: int) -> int:
    """How well a copy of `expert` stands on `worker`: by domain first, then by component."""
    rank = 0 if has_copy_in_domain(state, expert, worker, NOBODY) else 2
    root = root_of(state, worker)
    for other in range(state.load_D.size):
        if state.is_held_ED[expert, other] and root_of(state, other) == root:
            return rank
    return rank + 1


@compiled
def _worker_for(state: LayerState, expert: int) -> int:
    """Return the best worker with a free slot for a copy of `expert`."""
    best, best_rank, least = NOBODY, -1, 0.0
    for worker in range(state.load_D.size):
        if state.num_free_D[worker] > 0 and not state.is_held_ED[expert, worker]:
            rank, time = _rank(state, expert, worker), time_of(state, worker)
            if rank > best_rank or (rank == best_rank and time < least):
                best, best_rank, least = worker, rank, time
    return best


@compiled
def _place_of(state: LayerState, leaving: int, coming: int) -> int:
    """Return the holder of `leaving` on which a copy of `coming` is best."""
    best, best_rank, least = NOBODY, -1, 0.0
    for worker in range(state.load_D.size):
        if state.is_held_ED[leaving, worker] and not state.is_held_ED[coming, worker]:
            rank, time = _rank(state, coming, worker), time_of(state, worker)
            if rank > best_rank or (rank == best_rank and time < least):
                best, best_rank, least = worker, rank, time
    return best


@compiled
def _add_needed(state: LayerState, rule: SearchRule) -> int:
    """Give every expert the copies that it must have; return the moves, or -1 if it is stuck."""
    num_moves = 0
    for expert in range(state.num_E.size):
        while state.num_E[expert] < rule.min_copies:
            worker = _worker_for(state, expert)
            if worker == NOBODY:
                leaving = _lightest(state, rule.min_copies, expert)
                if leaving == NOBODY:
                    return -1
                worker = _place_of(state, leaving, expert)
                remove_copy(state, leaving, worker)
                find_components(state)
            add_copy(state, expert, worker)
            num_moves += 1
    return num_moves


@compiled
def _separate(state: LayerState) -> int:
    """Swap copies that share a failure domain with another copy out of it; return the moves."""
    num_moves = 0
    for worker in range(state.load_D.size):
        for slot in range(state.capacity_D[worker]):
            expert = state.slots_DS[worker, slot]
            if expert == EMPTY or not has_copy_in_domain(state, expert, worker, worker):
                continue
            other, other_slot = _other_domain(state, worker, expert)
            if other != NOBODY:
                swap_copies(state, worker, slot, other, other_slot)
                num_moves += 2
    if num_moves > 0:
        find_components(state)
    return num_moves


@compiled
def _other_domain(state: LayerState, worker: int, expert: int) -> tuple[int, int]:
    """Return a slot with which `worker` can swap `expert`, so that neither shares a domain."""
    for other in range(state.load_D.size):
        if state.is_held_ED[expert, other] or has_copy_in_domain(state, expert, other, worker):
            continue
        for slot in range(state.capacity_D[other]):
            back = state.slots_DS[other, slot]
            if back == EMPTY or state.is_held_ED[back, worker]:
                continue
            if not has_copy_in_domain(state, back, worker, other):
                return other, slot
    return NOBODY, NOBODY


@compiled
def _spread(state: LayerState) -> int:
    """Swap experts that are to get copies out of workers with many of them; return the moves.

    Each copy will tie the worker where its expert is to another one. A worker without such an
    expert can only take load, and one with many cannot use them all.
    """
    is_hot_E = _to_replicate(state)
    # Experts about as heavy as the lightest hot one change least when they are swapped.
    edge = np.where(is_hot_E, state.weight_E, np.inf).min()
    num_hot_D = np.zeros(state.load_D.size, np.int64)
    for worker in range(state.load_D.size):
        for expert in state.slots_DS[worker]:
            if expert != EMPTY and is_hot_E[expert]:
                num_hot_D[worker] += 1
    num_moves = 0
    for _ in range(state.load_D.size):
        rich, poor = int(num_hot_D.argmax()), int(num_hot_D.argmin())
        if num_hot_D[rich] - num_hot_D[poor] < 2:
            break
        slot = _slot_to_swap(state, rich, poor, is_hot_E, edge)
        other_slot = _slot_to_swap(state, poor, rich, ~is_hot_E, edge)
        if slot == NOBODY or other_slot == NOBODY:
            break
        swap_copies(state, rich, slot, poor, other_slot)
        num_hot_D[rich] -= 1
        num_hot_D[poor] += 1
        num_moves += 2
    return num_moves


@compiled
def _to_replicate(state: LayerState) -> NDArray[np.bool_]:
    """Return which experts have several copies when all free slots are used for the heaviest."""
    num_E = np.maximum(state.num_E, 1)
    for _ in range(state.num_free_D.sum()):
        best, most = 0, -1.0
        for expert in range(num_E.size):
            if state.weight_E[expert] > most * num_E[expert]:
                best, most = expert, state.weight_E[expert] / num_E[expert]
        num_E[best] += 1
    return num_E > 1


@compiled
def _slot_to_swap(
    state: LayerState, worker: int, other: int, may_go_E: NDArray[np.bool_], edge: float
) -> int:
    """Return the slot of an expert that may go to `other`: the one nearest to a load."""
    best, least = NOBODY, np.inf
    for slot in range(state.capacity_D[worker]):
        expert = state.slots_DS[worker, slot]
        if expert == EMPTY or state.num_E[expert] > 1 or not may_go_E[expert]:
            continue
        distance = abs(state.weight_E[expert] - edge)
        if distance < least and not state.is_held_ED[expert, other]:
            best, least = slot, distance
    return best


@compiled
def _next_to_copy(state: LayerState, degree_D: NDArray[np.int64]) -> int:
    """Return the expert whose next copy helps most: much load per copy, few ties where it is."""
    best, most = NOBODY, -1.0
    for expert in range(state.num_E.size):
        num = state.num_E[expert]
        if num >= state.load_D.size:
            continue
        ties = 0
        for worker in range(state.load_D.size):
            if state.is_held_ED[expert, worker]:
                ties += degree_D[worker]
        load = state.weight_E[expert] / num / (1.0 + TIE_DISCOUNT * ties / num)
        if load > most:
            best, most = expert, load
    return best


@compiled
def _count_ties(state: LayerState) -> NDArray[np.int64]:
    """Return how many experts with several copies each worker holds."""
    num_D = np.zeros(state.load_D.size, np.int64)
    for worker in range(num_D.size):
        for expert in state.slots_DS[worker]:
            if expert != EMPTY and state.num_E[expert] > 1:
                num_D[worker] += 1
    return num_D


@compiled
def _fill_free(state: LayerState, rule: SearchRule, trail: Trail, num_moves: int) -> int:
    """Use the free slots."""
    degree_D = _count_ties(state)
    num_steps = 0
    for _ in range(state.num_free_D.sum()):
        expert = _next_to_copy(state, degree_D) if rule.keeps_ties else _heaviest(state)
        if expert == NOBODY:
            break
        worker = _worker_for(state, expert)
        if worker == NOBODY:
            break
        if state.num_E[expert] == 1:
            degree_D += state.is_held_ED[expert]
        degree_D[worker] += 1
        add_copy(state, expert, worker)
        num_moves += 1
        num_steps += 1
        if num_steps % rule.mark_every == 0:
            _mark(trail, state, num_moves)
    if num_steps > 0:
        _mark(trail, state, num_moves)
    return num_moves


@compiled
def _exchange(state: LayerState, rule: SearchRule, trail: Trail, num_moves: int) -> int:
    """Replace copies that serve little."""
    for step in range(1, 4 * state.load_D.size):
        coming = _heaviest(state)
        leaving = _lightest(state, rule.min_copies, NOBODY)
        if leaving == NOBODY or coming in (NOBODY, leaving):
            break
        gain = state.weight_E[coming] / state.num_E[coming]
        loss = state.weight_E[leaving] / (state.num_E[leaving] - 1)
        if gain <= (1.0 + rule.copy_hysteresis) * loss:
            break
        worker = _place_of(state, leaving, coming)
        if worker == NOBODY:
            break
        remove_copy(state, leaving, worker)
        find_components(state)
        add_copy(state, coming, worker)
        num_moves += 1
        if step % rule.mark_every == 0:
            _mark(trail, state, num_moves)
    if num_moves > 0:
        _mark(trail, state, num_moves)
    return num_moves


@compiled
def _swap(state: LayerState, rule: SearchRule, trail: Trail, num_moves: int) -> int:
    """Level the workers."""
    mean = state.load_D.sum() / (1.0 / state.seconds_D).sum()
    is_done_D = np.zeros(state.load_D.size, np.bool_)
    for step in range(1, 8 * state.load_D.size):
        slowest, time = NOBODY, (1.0 + rule.level_tolerance) * mean
        for worker in range(state.load_D.size):
            if not is_done_D[worker] and time_of(state, worker) > time:
                slowest, time = worker, time_of(state, worker)
        if slowest == NOBODY:
            break
        other, slot, other_slot, after = _best_swap(state, slowest, rule.keeps_ties)
        if other == NOBODY or after > time - 0.1 * rule.level_tolerance * mean:
            is_done_D[slowest] = True
            continue
        swap_copies(state, slowest, slot, other, other_slot)
        is_done_D[other] = False
        num_moves += 2
        if step % rule.mark_every == 0:
            _mark(trail, state, num_moves)
    return num_moves


@compiled
def _best_swap(state: LayerState, worker: int, keeps_ties: bool) -> tuple[int, int, int, float]:  # noqa: FBT001 - compiled functions take arguments by position.
    """Return the swap after which the slower of the two workers is fastest, and its time.

    As (other worker, slot, other slot, time); `NOBODY` if none helps.
    """
    best, found = time_of(state, worker), (NOBODY, NOBODY, NOBODY)
    for other in range(state.load_D.size):
        # No swap takes the two below their common level.
        speed = 1.0 / state.seconds_D[worker] + 1.0 / state.seconds_D[other]
        if other == worker or (state.load_D[worker] + state.load_D[other]) / speed >= best:
            continue
        for slot in range(state.capacity_D[worker]):
            if not _may_go(state, worker, slot, other, keeps_ties):
                continue
            for other_slot in range(state.capacity_D[other]):
                after = _time_after(state, worker, slot, other, other_slot)
                if after < best and _may_go(state, other, other_slot, worker, keeps_ties):
                    best, found = after, (other, slot, other_slot)
    return found[0], found[1], found[2], best


@compiled
def _may_go(state: LayerState, worker: int, slot: int, other: int, keeps_ties: bool) -> bool:  # noqa: FBT001
    """Whether the expert in a slot may go to another worker."""
    expert = state.slots_DS[worker, slot]
    if expert == EMPTY or state.is_held_ED[expert, other]:
        return False
    if state.num_E[expert] == 1:
        return True
    return not keeps_ties and not has_copy_in_domain(state, expert, other, worker)


@compiled
def _time_after(state: LayerState, worker: int, slot: int, other: int, other_slot: int) -> float:
    """Return the time of the slower of two workers after a swap of two slots."""
    a, b = state.slots_DS[worker, slot], state.slots_DS[other, other_slot]
    if b == EMPTY:
        return np.inf
    gain = state.weight_E[a] / state.num_E[a] - state.weight_E[b] / state.num_E[b]
    return float(
        max(
            (state.load_D[worker] - gain) * state.seconds_D[worker],
            (state.load_D[other] + gain) * state.seconds_D[other],
        )
    )
