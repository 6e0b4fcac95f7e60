"""Peaks over averages of many steps, compiled.

Shapes: T steps, L layers, E logical experts, D workers, S slots, R most copies, N choosers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.compiled import compiled
from router.copies import Copies
from router.replica_choice import split_picks


@compiled
def fixed_pars(
    load_TE: NDArray[np.number],
    slots_DS: NDArray[np.int64],
    shares_DS: NDArray[np.float64],
    pars_T: NDArray[np.float64],
) -> None:
    """Write the PAR of each step of one layer, for fixed shares. Zeros count as one."""
    num_workers, num_slots = slots_DS.shape
    for step in range(load_TE.shape[0]):
        peak, total = 0.0, 0.0
        for worker in range(num_workers):
            load = 0.0
            for slot in range(num_slots):
                expert = slots_DS[worker, slot]
                if expert >= 0:
                    load += max(load_TE[step, expert], 1) * shares_DS[worker, slot]
            peak = max(peak, load)
            total += load
        pars_T[step] = peak * num_workers / total


@compiled
def chosen_pars(
    load_TE: NDArray[np.number],
    copies: Copies,
    num_choosers: int,
    seed: int,
    pars_T: NDArray[np.float64],
) -> None:
    """Write the PAR of each step of one layer, split by `num_choosers` attention workers.

    Each of them has a random part of the picks and splits it alone.
    """
    num_workers, num_experts = copies.seconds_W.size, load_TE.shape[1]
    load_W = np.empty(num_workers)
    total_W = np.empty(num_workers)
    part_ER = np.empty(copies.worker_ER.shape)
    load_NE = np.empty((num_choosers, num_experts))
    state = np.uint64(2 * seed + 1)
    for step in range(load_TE.shape[0]):
        state = _deal(load_TE[step], load_NE, state)
        total_W[:] = 0.0
        for chooser in range(num_choosers):
            load_W[:] = 0.0
            split_picks(load_NE[chooser], copies, load_W, part_ER)
            total_W += load_W
        pars_T[step] = total_W.max() * num_workers / total_W.sum()


@compiled
def _deal(load_E: NDArray[np.number], load_NE: NDArray[np.float64], state: np.uint64) -> np.uint64:
    """Give every pick to one of N at random (xorshift64*); return the generator's new state."""
    num = load_NE.shape[0]
    load_NE[:] = 0.0
    for expert in range(load_E.size):
        picks = max(load_E[expert], 1)
        if num == 1:
            load_NE[0, expert] = picks
            continue
        for _ in range(picks):
            state ^= state >> np.uint64(12)
            state ^= state << np.uint64(25)
            state ^= state >> np.uint64(27)
            high = (state * np.uint64(2685821657736338717)) >> np.uint64(40)
            load_NE[int(high) % num, expert] += 1.0
    return state
