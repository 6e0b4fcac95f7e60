"""Changes one row of logits before a token is drawn from it.

Order: logit bias; repetition, presence and frequency penalty; end tokens ruled out; the grammar's
mask last. The work is in arrays of the distinct tokens concerned, never a loop over the vocabulary,
and a row depends on its own request only.

Repetition penalty: Keskar et al., "CTRL" (arXiv 1909.05858), section 4.1, with the sign of the
logit minded. Presence and frequency penalty as in OpenAI's API.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class LogitShape:
    """What a request does to its logits; the same at every position."""

    bias_ids: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    bias: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """Added to the logits of `bias_ids`."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def needs_counts(self) -> bool:
        """Whether it depends on the tokens so far."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1.0 or any(penalties)

    @property
    def is_neutral(self) -> bool:
        """Whether it changes nothing."""
        return not self.needs_counts and self.bias_ids.size == 0


def shape_logits(
    logits_V: NDArray[np.float32],
    shape: LogitShape,
    counts: TokenCounts | None,
    *,
    ruled_out: NDArray[np.int64] | None = None,
    allowed_V: NDArray[np.bool_] | None = None,
) -> None:
    """Change a row in place.

    Args:
        logits_V: Of the model; finite, or -inf.
        shape: Bias and penalties.
        counts: Tokens so far; needed when `shape.needs_counts`.
        ruled_out: Tokens that must not be drawn, unless the mask allows nothing else.
        allowed_V: Mask of the grammar; None allows all.
    """
    if shape.bias_ids.size:
        logits_V[shape.bias_ids] += shape.bias
    if counts is not None and shape.needs_counts:
        _penalise(logits_V, shape, counts)
    if ruled_out is not None and ruled_out.size:
        kept = logits_V[ruled_out]
        logits_V[ruled_out] = -np.inf
        if allowed_V is not None and not np.isfinite(logits_V[allowed_V]).any():
            logits_V[ruled_out] = kept
    if allowed_V is not None:
        logits_V[~allowed_V] = -np.inf


def _penalise(logits_V: NDArray[np.float32], shape: LogitShape, counts: TokenCounts) -> None:
    if shape.repetition_penalty != 1.0:
        seen = counts.seen_ids
        values = logits_V[seen]
        penalty = np.float32(shape.repetition_penalty)
        logits_V[seen] = np.where(values > 0, values / penalty, values * penalty)
    taken = shape.presence_penalty + shape.frequency_penalty * counts.answer_counts
    logits_V[counts.answer_ids] -= taken.astype(np.float32)
