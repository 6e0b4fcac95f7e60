"""The two norms of the model, rounded in the released order.

Both work on the last dimension and are autograd-safe; a row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.ops.constants import constant

L2_EPS = 1e-6


def inverse_rms(v: Tensor, *, eps: float) -> Tensor:
    """Return `1 / sqrt(mean(v^2) + eps)` over the last dimension of float32 `v`, dimension kept."""
    norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    return torch.addcmul(constant(eps, v.device), norm, norm, value=1 / v.shape[-1]).rsqrt()


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return `weight * cast(x * rsqrt(mean(x^2) + eps))`.

    The statistic and the normalised value are float32; the value is cast to the dtype of `x`
    before the weight multiplies it (the released order).

    Args:
        x: `[.., D]`, any float dtype.
        weight: `[D]`, the dtype of `x`.
        eps: Added to the mean of squares.
    """
    v = x.float()
    return weight * (v * inverse_rms(v, eps=eps)).to(x.dtype)


def l2_normalize(x: Tensor, *, scale: Tensor | None = None) -> Tensor:
    """Return `scale * x / sqrt(sum(x^2) + 1e-6)` for float32 `x`.

    Epsilon joins the sum, not the mean; a near-zero row comes out small instead of blown up.

    Args:
        x: `[.., D]`.
        scale: Broadcast to `[.., 1]`; None is 1.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = torch.addcmul(constant(L2_EPS, x.device), norm, norm).rsqrt()
    return x * (factor if scale is None else factor * scale)
