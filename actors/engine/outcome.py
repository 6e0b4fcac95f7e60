"""What a step gives to the outside: frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from actors.request_channel import Ended, LogitRows, NewTokens, PromptLogprobs


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """News since the last step. Tokens and logits of a request precede its end."""

    step: int
    tokens: tuple[NewTokens, ...]
    logits: tuple[LogitRows, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...]
    ended: tuple[Ended, ...]
    num_computed_tokens: int
    """Rows of all lanes; 0 when nothing could be computed: then wait for news or a deadline."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and levels of an engine at one moment. Totals only grow."""

    num_running: int
    num_queued: int
    num_free_blocks: int
    num_used_blocks: int
    num_free_slots: int
    num_used_slots: int
    steps_total: int
    prompt_tokens_total: int
    """Prompt tokens computed."""
    generated_tokens_total: int
    replayed_tokens_total: int
    ended_requests_total: int
    failed_lanes_total: int
    step_seconds_total: float
    """Time in steps that computed something, seconds."""
