"""Chooses the next token of each request.

The draw of a request depends on its own logits, seed, choice and position and on nothing else:
every row is worked on alone, in float64, with one number from a counter-based generator. So a
replay, a move to another worker or another batch gives the same tokens.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.errors import InvalidRequestError, InvariantError

_UINT64 = (1 << 64) - 1
_MIN_TEMPERATURE = 1e-200
"""Greedy already, and no difference of float32 logits divided by it overflows float64."""
_FIRST_SORTED = 1024
"""Most likely tokens sorted before all are: nucleus sets of real text are far smaller."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits becomes a token."""

    temperature: float = 0.0
    """0 takes the most likely token; the other fields then have no effect."""
    top_p: float = 1.0
    """Keep the most likely tokens whose probabilities reach this sum; 1 keeps all."""
    top_k: int | None = None
    """Keep this many of the most likely tokens; None keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    seed: int = 0
    """Seed of the request, 64 bits."""
    choice: int = 0
    """Which of several answers to one prompt this is."""
    position: int = 0
    """Absolute position of the token that is drawn."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            InvalidRequestError: Naming the field, its value and the allowed range.
        """
        if not 0.0 <= self.temperature < float("inf"):
            raise InvalidRequestError(f"temperature is {self.temperature}; expected >= 0")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequestError(f"top_p is {self.top_p}; expected 0 < top_p <= 1")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidRequestError(f"top_k is {self.top_k}; expected >= 1, or none")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidRequestError(f"min_p is {self.min_p}; expected 0 to 1")


def sample_tokens(logits_BV: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Draw one token per row.

    Order of the cuts: temperature, then top-k, top-p and min-p. Equal logits are ranked by lower
    id.

    Args:
        logits_BV: Any float dtype, any device.
        rows: One per row of logits.

    Returns:
        Token ids, in the order of the rows.

    Raises:
        InvariantError: Rows and logits do not agree, or a row has NaN, +inf or nothing but -inf.
    """
    return sample_rows(host_logits(logits_BV), rows)


def host_logits(logits_BV: Tensor) -> npt.NDArray[np.float32]:
    """Return logits as float32 in the processor's memory; may share it with the tensor."""
    host: npt.NDArray[np.float32]
    host = logits_BV.detach().to(device="cpu", dtype=torch.float32).numpy()
    return host


def sample_rows(logits: npt.NDArray[np.float32], rows: Sequence[SamplingRow]) -> list[int]:
    """`sample_tokens` for logits in the processor's memory."""
    if logits.shape[0] != len(rows):
        raise InvariantError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
    if not rows:
        return []
    broken = np.flatnonzero(~np.isfinite(logits.max(axis=1)))
    if broken.size:
        raise InvariantError(f"logits of rows {broken.tolist()} have no finite maximum")
    # numpy's argmax is specified to give the first of equal values; torch's is not.
    greedy = logits.argmax(axis=1)
    return [
        int(greedy[index]) if row.temperature == 0.0 else _draw(logits[index], row)
        for index, row in enumerate(rows)
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) of one draw, by Philox-4x64 keyed by the seed."""
    counter = [position & _UINT64, choice & _UINT64, 0, 0]
    generator = np.random.Philox(key=seed & _UINT64, counter=counter)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def _draw(logits_V: npt.NDArray[np.float32], row: SamplingRow) -> int:
    """Invert the distribution function at the row's uniform number, tokens in order of their id."""
    scaled = logits_V.astype(np.float64)
    scaled -= scaled.max()
    weights = np.exp(scaled / max(row.temperature, _MIN_TEMPERATURE))
    if row.top_k is not None and row.top_k < weights.size:
        _keep_only(weights, most_likely(weights, row.top_k))
    if row.top_p < 1.0:
        _keep_only(weights, _nucleus(weights, row.top_p))
    if row.min_p > 0.0:
        # The most likely token weighs 1.
        weights[weights < row.min_p] = 0.0
    cumulative = np.cumsum(weights)
    threshold = uniform(row.seed, row.choice, row.position) * cumulative[-1]
    token = int(np.searchsorted(cumulative, threshold, side="right"))
    # Rounding may put the threshold on the total itself: then it is the last possible token.
    return min(token, int(np.searchsorted(cumulative, cumulative[-1], side="left")))


def _keep_only(weights: npt.NDArray[np.float64], kept: npt.NDArray[np.int64]) -> None:
    """Zero every weight that is not kept."""
    values = weights[kept]
    weights[:] = 0.0
    weights[kept] = values


def most_likely(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Return the ids of the `count` largest weights, largest first, equal ones by lower id."""
    if count >= weights.size:
        return np.argsort(-weights, kind="stable")
    border = np.partition(weights, weights.size - count)[weights.size - count]
    above = np.flatnonzero(weights > border)
    at_border = np.flatnonzero(weights == border)[: count - above.size]
    chosen = np.concatenate([above, at_border])
    chosen.sort()
    return chosen[np.argsort(-weights[chosen], kind="stable")]


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Ids of the smallest set of most likely tokens that reaches `top_p` of the total."""
    goal = top_p * np.cumsum(weights)[-1]
    for count in (_FIRST_SORTED, weights.size):
        ranked = most_likely(weights, count)
        cumulative = np.cumsum(weights[ranked])
        if cumulative[-1] >= goal:
            return ranked[: int(np.searchsorted(cumulative, goal, side="left")) + 1]
    return ranked
