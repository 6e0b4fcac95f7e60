"""Element-wise functions whose bits do not depend on where an element lies.

A vectorised loop ends in a scalar tail that rounds `exp`, `tanh` and `sigmoid` differently, and a
loop that is split over threads has such a tail in the middle. Under invariant numerics callers keep
element counts at multiples of `VECTOR_ELEMENTS`, and pieces here stay below the size from which the
CPU backend splits a loop. Exactly rounded operations (`+ - *`, comparisons) need none of this.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from configs.numerics import Numerics

VECTOR_ELEMENTS = 32
"""Two vectors of 16 float32, the unroll of the widest vectorised loop."""
SERIAL_ELEMENTS = 16_384
"""Elements of one piece: half of the grain from which the CPU backend uses several threads."""


def apply_pointwise(op: Callable[..., Tensor], *tensors: Tensor, numerics: Numerics) -> Tensor:
    """Return `op(*tensors)` for an element-wise `op` and tensors of one shape. Autograd-safe.

    Under invariant numerics the tensors are made contiguous, because a loop over a view has a tail
    in every row, and long ones are computed in serial pieces.
    """
    first = tensors[0]
    if numerics is Numerics.FAST or first.device.type != "cpu":
        return op(*tensors)
    whole = [tensor.contiguous() for tensor in tensors]
    if first.numel() <= SERIAL_ELEMENTS:
        return op(*whole)
    pieces = zip(*(torch.split(tensor.view(-1), SERIAL_ELEMENTS) for tensor in whole), strict=True)
    return torch.cat([op(*piece) for piece in pieces]).view(first.shape)
