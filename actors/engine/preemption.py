"""Which running requests give up their memory. Pure; a part of `actors/engine/scheduler.py`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from actors.engine.scheduler_state import BoolArray, IntArray, RunningView, SchedulerState

PAUSE_PATIENCE_STEPS = 64
"""A request that could compute nothing for so many steps gives way to others."""


class Growth(NamedTuple):
    """What decode needs of the memory."""

    decode: IntArray
    """Requests that decode, in order of rank; some of those that were chosen may lack a block."""
    num_blocks: int
    """Blocks that they take."""
    preempted: tuple[int, ...]
    """Requests that give way to them."""


def plan_growth(
    running: RunningView, chosen: IntArray, *, num_available: int, block_tokens: int
) -> Growth:
    """Find a block for each of the `chosen` whose last one is full.

    Requests that may not run give way first, then the last in rank. The first in rank of those that
    grow never does, so that it goes on until it ends.
    """
    is_full = running.computed[chosen] >= running.num_blocks[chosen] * block_tokens
    growing = chosen[is_full]
    num_needed = len(growing)
    if num_needed <= num_available:
        return Growth(chosen, num_needed, ())
    preempted: list[int] = []
    waiting = set(growing.tolist())
    for index in _victims(running).tolist():
        if num_needed <= num_available:
            break
        if index == growing[0]:
            continue
        preempted.append(index)
        num_available += int(running.num_private[index])
        num_needed -= index in waiting
        waiting.discard(index)
    # Should all that give way not be enough, the first in rank go on with what there is.
    served = [index for index in growing.tolist() if index in waiting][:num_available]
    goes_on = ~is_full | np.isin(chosen, served)
    goes_on &= ~np.isin(chosen, preempted)
    return Growth(chosen[goes_on], len(served), tuple(preempted))


def plan_displacement(state: SchedulerState) -> tuple[int, ...]:
    """Return the running requests that give way to the head of the queue, which does not fit.

    These may: requests that have not been able to run for `PAUSE_PATIENCE_STEPS`, or at once where
    none can, because then no step passes; then less urgent ones that rank behind it, the last first
    (others would be back before it). None if all of them together are not enough.
    """
    running, head = state.running, state.queued[0]
    is_patient = state.step - running.last_step < PAUSE_PATIENCE_STEPS
    is_stuck = ~running.can_run & (~is_patient | (not running.can_run.any()))
    is_behind = np.arange(len(running)) >= head.num_ahead
    may_leave = is_stuck | (is_behind & (running.priority > head.priority))
    may_leave &= running.num_slots > 0
    num_blocks, num_slots = state.num_available_blocks, state.num_free_slots
    num_running = len(running)
    preempted: list[int] = []
    victims = _victims(running)
    for index in victims[may_leave[victims]].tolist():
        preempted.append(index)
        num_blocks += int(running.num_private[index])
        num_slots += int(running.num_slots[index])
        num_running -= int(running.num_slots[index])
        if head.num_blocks + num_running <= num_blocks and head.num_slots <= num_slots:
            return tuple(preempted)
    return _displace_sharing(running, is_stuck, state)


def _displace_sharing(
    running: RunningView, is_stuck: BoolArray, state: SchedulerState
) -> tuple[int, ...]:
    """Return all that cannot run, if the blocks that they share with each other may be enough.

    Such blocks are private to none of them. Those that give way wait aside, so it happens once.
    """
    head, leaving = state.queued[0], np.flatnonzero(is_stuck & (running.num_slots > 0))
    num_slots = int(running.num_slots[leaving].sum())
    num_blocks = state.num_available_blocks + int(running.num_blocks[is_stuck].sum())
    num_needed = head.num_blocks + len(running) - num_slots
    is_enough = num_needed <= num_blocks and head.num_slots <= state.num_free_slots + num_slots
    return tuple(leaving.tolist()) if is_enough else ()


def _victims(running: RunningView) -> IntArray:
    """Requests that can be preempted, those first that should be."""
    indices = np.flatnonzero(running.num_slots > 0)
    # Stable on reversed ranks: paused ones first, each kind from its last.
    last_first = indices[::-1]
    return last_first[np.argsort(running.can_run[last_first], kind="stable")]
