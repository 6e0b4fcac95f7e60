"""The exact program: the best split of one step's load over given copies.

Twin of `router/replica_choice.split_load`, and the floor for a choice per step.

Shapes: E logical experts, D workers, S slots, V copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from configs.errors import PlacementError


def exact_time(
    load_E: NDArray[np.float64],
    slots_DS: NDArray[np.int64],
    seconds_D: NDArray[np.float64] | None = None,
) -> float:
    """Return the least time of the slowest worker over all splits, whole picks or not.

    Raises:
        PlacementError: An expert with load has no copy.
    """
    num_workers = slots_DS.shape[0]
    seconds_D = np.ones(num_workers) if seconds_D is None else seconds_D
    worker_V, slot_V = np.nonzero(slots_DS >= 0)
    expert_V = slots_DS[worker_V, slot_V]
    num_copies = expert_V.size
    one_V = np.arange(num_copies)
    does = coo_matrix(
        (
            np.concatenate([seconds_D[worker_V], -np.ones(num_workers)]),
            (
                np.concatenate([worker_V, np.arange(num_workers)]),
                np.concatenate([one_V, np.full(num_workers, num_copies)]),
            ),
        )
    )
    whole = coo_matrix((np.ones(num_copies), (expert_V, one_V)), (load_E.size, num_copies + 1))
    cost = np.zeros(num_copies + 1)
    cost[-1] = 1.0
    result = linprog(
        cost, does.tocsr(), np.zeros(num_workers), whole.tocsr(), load_E, method="highs"
    )
    if not result.success:
        raise PlacementError(f"no split serves this load: {result.message}")
    return float(result.fun)
