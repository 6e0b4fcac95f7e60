"""Matrix products with a numeric promise.

A plain product changes the low bits of a row with the number of rows beside it. Under invariant
numerics every product runs on row tiles of a fixed size, the last one padded with zeros, so that a
row depends on its own values only. Measured on CPU in torch: float32 is stable in 16-row tiles,
bfloat16 in 32-row tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from configs.numerics import Numerics

ROW_TILE = 32
"""Rows per tile under invariant numerics. Whole batches are padded to a multiple of it, so that
vectorised element-wise kernels see no tail either."""
MAX_JOINED_BYTES = 4 << 20
"""Matrices up to this size together are joined: below it a product costs its dispatch, not its
reading, and the copy costs little memory."""


def linear(x: Tensor, weight: Tensor, *, numerics: Numerics) -> Tensor:
    """Return `x @ weight.T` for `x` `[T, in]` and `weight` `[out, in]`, in the dtype of `x`.

    Under invariant numerics T may be any number; a T that is no multiple of `ROW_TILE` is padded
    and cut here. Autograd-safe in both modes.
    """
    if numerics is Numerics.FAST:
        return functional.linear(x, weight)
    num_rows = x.shape[0]
    if num_rows == ROW_TILE:
        return functional.linear(x, weight)
    padded = pad_rows(x)
    tiles = [functional.linear(tile, weight) for tile in torch.split(padded, ROW_TILE)]
    return torch.cat(tiles)[:num_rows] if tiles else x.new_zeros(0, weight.shape[0])


def pad_rows(x: Tensor) -> Tensor:
    """Append zero rows until the row count is a multiple of `ROW_TILE`."""
    missing = -x.shape[0] % ROW_TILE
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


class JoinedLinear:
    """Several products of one input. Small matrices of one dtype are joined into one product."""

    def __init__(self, weights: Sequence[Tensor], *, numerics: Numerics) -> None:
        self._numerics = numerics
        self._sizes = [weight.shape[0] for weight in weights]
        num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
        self._is_joined = (
            num_bytes <= MAX_JOINED_BYTES and len({weight.dtype for weight in weights}) == 1
        )
        self._weights = (torch.cat(tuple(weights)),) if self._is_joined else tuple(weights)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one `[T, out]` per matrix; they may be views into one tensor, not contiguous."""
        if not self._is_joined:
            return tuple(
                linear(x.to(weight.dtype), weight, numerics=self._numerics)
                for weight in self._weights
            )
        joined = linear(x, self._weights[0], numerics=self._numerics)
        return tuple(torch.split_with_sizes(joined, self._sizes, dim=1))
