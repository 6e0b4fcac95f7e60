"""Where the copies of a layer's experts are, as arrays.

Shapes: E logical experts, R most copies of an expert, W workers, M experts with copies.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NOBODY = -1


class Copies(NamedTuple):
    """Where the copies of a layer's experts are."""

    worker_ER: NDArray[np.int64]
    """Worker index of each copy; `NOBODY` beyond the copies."""
    num_E: NDArray[np.int64]
    """Copies of each expert, each on a worker of its own."""
    replicated_M: NDArray[np.int64]
    """Experts with more than one copy, ascending."""
    seconds_W: NDArray[np.float64]
    """Time of a worker for one pick, more than 0; only their ratios matter."""
