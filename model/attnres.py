"""Block Attention Residuals: every sub-layer reads a softmax mix of earlier rows of its token.

A token carries a bank of frozen rows (its embedding, then each completed block) and a running
prefix. Rows are mixed raw: not normed, not mixed before. The norm weight and the projection of a
mix are folded into one float32 vector when weights are loaded, because only their product matters.

Shapes: T tokens, D hidden size, N rows.
Source: K3 report section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from configs.numerics import Numerics
from model.norm import inverse_rms


def mix_rows(rows: Sequence[Tensor], vector_D: Tensor, *, eps: float, numerics: Numerics) -> Tensor:
    """Return the softmax-weighted sum of raw rows, `[T, D]` in their dtype. Autograd-safe.

    The score of a row is its RMS-normed value times `vector_D`; scores, softmax and sum are
    float32.

    Args:
        rows: The bank and the running row of each token, N tensors `[T, D]`.
        vector_D: Folded `res_norm * res_proj`, float32.
        eps: Epsilon of the norm inside the score.
        numerics: Under invariant numerics the bits of a token do not depend on T.
    """
    rows_TND = torch.stack(tuple(rows), dim=1)
    v_TND = rows_TND.float()
    inverse_TN1 = inverse_rms(v_TND, eps=eps)
    if numerics is Numerics.INVARIANT:
        # A product with a vector changes bits with the number of rows; a row sum does not.
        scores_TN1 = (v_TND * vector_D).sum(-1, keepdim=True) * inverse_TN1
        mixed_TD = (v_TND * scores_TN1.softmax(1)).sum(1)
    else:
        scores_TN1 = functional.linear(v_TND, vector_D[None]) * inverse_TN1
        mixed_TD = torch.bmm(scores_TN1.softmax(1).transpose(1, 2), v_TND).flatten(1)
    return mixed_TD.to(rows_TND.dtype)
