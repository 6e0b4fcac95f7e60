"""Since when the load is what it is now: the last shift of domain within a window. Pure.

Shapes: T steps, B blocks of steps, M series (layers times experts).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.compiled import compiled

BLOCK_STEPS = 16
"""Steps whose mean is compared; a shift is placed between two blocks."""
MAX_DEVIATION = 4.0
"""A block belongs to the present while its squared deviation is below this many times the noise."""


def count_steps_since_shift(load_TLE: NDArray[np.number]) -> int:
    """Return how many of the last steps have the load of the present.

    Blocks of steps are taken in from the newest to the oldest, as long as their means differ from
    the mean of those before by no more than the noise of single steps explains. All series count
    together: a change of a few experts is noise, a change of domain is not.

    Args:
        load_TLE: Picks per step, oldest first.

    Returns:
        At most T; all of them while there are fewer than two blocks.
    """
    num_blocks = len(load_TLE) // BLOCK_STEPS
    if num_blocks < 2:
        return len(load_TLE)
    load_TM = load_TLE.reshape(len(load_TLE), -1)[-num_blocks * BLOCK_STEPS :]
    sum_BM = np.zeros((num_blocks, load_TM.shape[1]))
    square_M = np.zeros(load_TM.shape[1])
    _add_blocks(np.ascontiguousarray(load_TM), sum_BM, square_M)
    within_M = square_M - (sum_BM**2).sum(axis=0) / BLOCK_STEPS
    noise_M = within_M / (num_blocks * (BLOCK_STEPS - 1))
    # Counts are never less noisy than Poisson's; few steps can look so.
    noise_M = np.maximum(noise_M, np.maximum(sum_BM.mean(axis=0) / BLOCK_STEPS, 1e-9))
    mean_BM = sum_BM / BLOCK_STEPS
    present_M, num_taken = mean_BM[-1].copy(), 1
    while num_taken < num_blocks:
        block_M = mean_BM[-num_taken - 1]
        variance_M = noise_M * (1 + 1 / num_taken) / BLOCK_STEPS
        if float(((block_M - present_M) ** 2 / variance_M).mean()) > MAX_DEVIATION:
            return num_taken * BLOCK_STEPS
        present_M += (block_M - present_M) / (num_taken + 1)
        num_taken += 1
    return len(load_TLE)


@compiled
def _add_blocks(
    load_TM: NDArray[np.number], sum_BM: NDArray[np.float64], square_M: NDArray[np.float64]
) -> None:
    for step in range(load_TM.shape[0]):
        block = step // BLOCK_STEPS
        for series in range(load_TM.shape[1]):
            load = float(load_TM[step, series])
            sum_BM[block, series] += load
            square_M[series] += load * load
