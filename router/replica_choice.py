"""Which of several copies of an expert serves a pick. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def choose_replica(
    *,
    token_positions_P: NDArray[np.uint32],
    experts_P: NDArray[np.uint32],
    num_copies_P: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return per pair the index of the copy that serves it, round robin over the batch.

    Depends on the arguments only, so that a repeated dispatch goes to the same copies. Neighbouring
    experts start at different copies.

    Args:
        token_positions_P: Position of the pair's token in the batch.
        experts_P: Logical expert.
        num_copies_P: Copies of that expert, at least 1.
    """
    return (token_positions_P.astype(np.int64) + experts_P) % num_copies_P
