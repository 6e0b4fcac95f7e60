"""What a client may ask for, whatever protocol it speaks. Frozen; None and empty are unset.

Nothing here is checked: `cluster/api/validation.py` does that, so that every protocol gives the
same errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from model.constraint import Constraint


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the order is that of `actors.request_channel.Sampling`."""

    temperature: float | None = None
    """>= 0; unset and 0 are greedy."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits, by token id; each in [-100, 100]."""
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class StopParams:
    """What ends an answer beside its length."""

    texts: Sequence[str] = ()
    """The first to be complete ends the answer, which is cut where that one begins."""
    token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    """The model's own end tokens do not end it."""
    min_tokens: int = 0
    """No end by a stop token, nor by a stop text that is complete, before so many tokens."""
    include_text: bool = False
    """The stop text that ended the answer is part of it."""


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A generation."""

    prompt: str | Sequence[int] | None
    """Text or token ids; None when the client sent neither."""
    model: str = ""
    """Empty takes the served one."""
    max_tokens: int | None = None
    sampling: SamplingParams = SamplingParams()
    stop: StopParams = StopParams()
    num_choices: int = 1
    """Answers that differ by their draws; the prompt is computed once."""
    constraint: Constraint | None = None
    logprobs: int | None = None
    """Log-probability of each token and of so many most likely ones; None reports none."""
    prompt_logprobs: int | None = None
    """The same for the prompt, before the first chunk."""
    resume_offset: int = 0
    """Tokens of the answer that the client already holds; with one choice only."""
    priority: int = 0
    """Lower is served earlier, -100 to 100."""


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """A score."""

    prompt: str | Sequence[int] | None
    model: str = ""
