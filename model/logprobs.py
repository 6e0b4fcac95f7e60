"""Log-probabilities of tokens, from the model's own logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.sampler import most_likely


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural log-probabilities of one row at temperature 1."""

    logprob: float
    """Of the token that was asked for."""
    top_ids: list[int]
    """Most likely first, equal ones by lower id."""
    top_logprobs: list[float]


def row_logprobs(logits_V: NDArray[np.float32], token_id: int, num_top: int) -> RowLogprobs:
    """Return the log-probability of a token and of the `num_top` most likely ones.

    In float64, of this row alone: the bits do not depend on what else is computed.
    """
    logits = logits_V.astype(np.float64)
    values = logits - logits.max()
    values -= np.log(np.exp(values).sum())
    # By the logits, as greedy sampling: those that differ by less than a rounding have one value.
    top_ids = most_likely(logits, min(num_top, logits.size)) if num_top else np.empty(0, np.int64)
    return RowLogprobs(
        logprob=float(values[token_id]),
        top_ids=top_ids.tolist(),
        top_logprobs=values[top_ids].tolist(),
    )
