"""SiTU, the gated activation of every MLP in the model (report section 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """Return `beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)`.

    Evaluated in float32, returned in the dtype of `gate`. `linear_beta=None` leaves `up` untouched.
    """
    a = gate.float()
    b = up.float()
    if linear_beta is not None:
        b = linear_beta * torch.tanh(b / linear_beta)
    return (beta * torch.tanh(a / beta) * torch.sigmoid(a) * b).to(gate.dtype)
