"""Matrix products with a numeric promise.

A plain product changes the low bits of a row with the number of rows beside it. Under invariant
numerics every product runs on row tiles of a fixed size, the last one padded with zeros, so that a
row depends on its own values only. Measured on CPU in torch: float32 is stable in 16-row tiles,
bfloat16 in 32-row tiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.numerics import Numerics

ROW_TILE = 32
"""Rows per tile under invariant numerics. Whole batches are padded to a multiple of it, so that
vectorised element-wise kernels see no tail either."""


def linear(x: Tensor, weight: Tensor, *, numerics: Numerics) -> Tensor:
    """Return `x @ weight.T` for `x` `[T, in]` and `weight` `[out, in]`, in the dtype of `x`.

    Under invariant numerics T may be any number; a T that is no multiple of `ROW_TILE` is padded
    and cut here. Autograd-safe in both modes.
    """
    if numerics is Numerics.FAST:
        return F.linear(x, weight)
    num_rows = x.shape[0]
    if num_rows == ROW_TILE:
        return F.linear(x, weight)
    padded = pad_rows(x)
    tiles = [F.linear(tile, weight) for tile in padded.split(ROW_TILE)]
    return torch.cat(tiles)[:num_rows] if tiles else x.new_zeros(0, weight.shape[0])


def pad_rows(x: Tensor) -> Tensor:
    """Append zero rows until the row count is a multiple of `ROW_TILE`."""
    missing = -x.shape[0] % ROW_TILE
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
