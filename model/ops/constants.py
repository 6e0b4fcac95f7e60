"""Numbers as tensors. A Python number in an operation costs a conversion of its own, every time."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=256)
def constant(value: float, device: torch.device) -> Tensor:
    """Return `value` as a float32 scalar tensor, made once. Nobody may write to it."""
    # Made outside inference mode, or a trainer could not use what a server made first.
    with torch.inference_mode(mode=False):
        return torch.tensor(value, dtype=torch.float32, device=device)
