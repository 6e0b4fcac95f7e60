"""The routed experts: SiTU FFNs in latent space, the whole expert side of the model.

Packed matrices are dequantized at use and dropped again; one call serves every row it is given, so
that merging rows before the call is what amortises reading the weights.

Shapes: N rows of one expert, P rows of several experts, L latent, F width inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from configs.errors import InvariantError
from configs.numerics import Numerics
from model.dims import ModelDims
from model.linear import linear, pad_rows
from model.mxfp4 import dequantize
from model.ops.pointwise import apply_pointwise
from model.situ import situ_glu
from model.weight_tree import ExpertWeights, PackedMatrix


@dataclass(frozen=True, slots=True)
class Activation:
    """Constants of SiTU; the same for every MLP of a model."""

    beta: float
    linear_beta: float | None
    """None leaves the up branch untouched."""

    @classmethod
    def of(cls, dims: ModelDims) -> Activation:
        """The activation of a model."""
        return cls(beta=dims.situ_beta, linear_beta=dims.situ_linear_beta)


def expert_ffn(
    weights: ExpertWeights, z_NL: Tensor, *, activation: Activation, numerics: Numerics
) -> Tensor:
    """Return `w2 SiTU(w1 z, w3 z)` for the latents of one expert.

    Autograd-safe for dense weights. Under invariant numerics a row's answer depends on that row
    only, whatever stands beside it.

    Args:
        weights: Dense matrices in the dtype of `z_NL`, or packed ones of any.
        z_NL: Latents in compute dtype, N >= 0.
        activation: SiTU constants.
        numerics: Fast, or padded row tiles.

    Returns:
        `[N, L]` in the dtype of `z_NL`.
    """
    num_rows = z_NL.shape[0]
    if numerics is Numerics.INVARIANT:
        # Padded here, not in `linear`, so that the activation sees whole vectors too.
        z_NL = pad_rows(z_NL)
    gate_NF = linear(z_NL, _dense(weights.gate, z_NL.dtype), numerics=numerics)
    up_NF = linear(z_NL, _dense(weights.up, z_NL.dtype), numerics=numerics)
    situ = partial(situ_glu, beta=activation.beta, linear_beta=activation.linear_beta)
    h_NF = apply_pointwise(situ, gate_NF, up_NF, numerics=numerics)
    return linear(h_NF, _dense(weights.down, z_NL.dtype), numerics=numerics)[:num_rows]


def grouped_expert_ffn(
    experts: Sequence[ExpertWeights],
    z_PL: Tensor,
    counts: Sequence[int],
    *,
    activation: Activation,
    numerics: Numerics,
) -> Tensor:
    """Apply several experts to rows sorted by expert.

    Args:
        experts: The experts that have rows, in the order of the rows.
        z_PL: Latents; the first `counts[0]` rows belong to `experts[0]`, and so on.
        counts: Rows per expert; their sum is P. An expert may have none and is then not read.
        activation: SiTU constants.
        numerics: As `expert_ffn`; under invariant numerics each row equals its `expert_ffn` row.

    Returns:
        `[P, L]` in the order and dtype of `z_PL`.

    Raises:
        InvariantError: Counts and rows or experts do not agree.
    """
    if len(counts) != len(experts) or sum(counts) != z_PL.shape[0]:
        raise InvariantError(
            f"grouped experts got {len(experts)} experts, {len(counts)} counts of together "
            f"{sum(counts)} and {z_PL.shape[0]} rows"
        )
    answers = [
        expert_ffn(weights, rows_NL, activation=activation, numerics=numerics)
        for weights, rows_NL in zip(experts, torch.split(z_PL, list(counts)), strict=True)
        if rows_NL.shape[0]
    ]
    return torch.cat(answers) if answers else torch.empty_like(z_PL)


def _dense(matrix: Tensor | PackedMatrix, dtype: torch.dtype) -> Tensor:
    return dequantize(matrix, dtype) if isinstance(matrix, PackedMatrix) else matrix
