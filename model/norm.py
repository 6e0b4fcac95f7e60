"""The two norms of the model, rounded in the released order.

Both work on the last dimension and are autograd-safe; a row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_rms(v: Tensor, *, eps: float) -> Tensor:
    """Return `1 / sqrt(mean(v^2) + eps)` over the last dimension of float32 `v`, dimension kept."""
    # A sum and a division: half the dispatch cost of `mean` on small tensors.
    return torch.rsqrt((v * v).sum(-1, keepdim=True) / v.shape[-1] + eps)


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


def l2_normalize(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return `x / sqrt(sum(x^2) + eps)` for float32 `x`: `eps` joins the sum, not the mean."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)
