"""A request that passed validation, on its way to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from actors.request_channel import Sampling


class Operation(StrEnum):
    """What is asked of the model; a label of metrics."""

    GENERATE = "generate"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request that passed validation, on its way to a worker."""

    token_ids: list[int]
    max_tokens: int
    """0 for a score."""
    sampling: Sampling
    """Its seed is replaced by `seed`."""
    seed: int | None
    """None lets the router draw one."""
    stop_token_ids: list[int]
    timeout_s: float | None
    """Seconds left of the client's deadline; None has none."""
    operation: Operation = Operation.GENERATE
    num_choices: int = 1
    priority: int = 0
    """Lower is served earlier."""
    grammar: str = ""
    """What the answer must match; "" has none."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
