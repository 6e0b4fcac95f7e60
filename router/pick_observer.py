"""Who is told which experts were picked."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class PickObserver(Protocol):
    """Told of every dispatch, on the router's thread, while the expert workers compute."""

    def count(self, layer: int, experts_P: NDArray[np.uint32]) -> None:
        """Take the logical experts of a dispatch, one per (token, pick); they are only read."""

    def forget_step(self) -> None:
        """The step was given up; what was counted of it does not count."""
