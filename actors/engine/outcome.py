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
    """Rows of all lanes; 0 with `num_preempted` 0: wait for news or a deadline."""
    num_preempted: int = 0
    """Requests that gave up their memory; what it was for is computed in the next step."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and levels of an engine at one moment. Totals only grow."""

    num_running: int
    num_queued: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Held by prefix snapshots only."""
    num_free_slots: int
    num_used_slots: int
    num_prefix_snapshots: int
    prefix_snapshot_bytes: int
    """State copies for reuse."""
    request_copy_bytes: int
    """Copies of requests that were preempted, or have come from another worker."""
    prefix_hits_total: int
    prefix_hit_tokens_total: int
    prefix_evictions_total: int
    kept_preemptions_total: int
    """Those that left a copy."""
    dropped_preemptions_total: int
    """Those after which everything is computed again."""
    recomputed_tokens_total: int
    restores_total: int
    refused_snapshots_total: int
    moved_requests_total: int
    steps_total: int
    prompt_tokens_total: int
    """Prompt tokens computed."""
    generated_tokens_total: int
    replayed_tokens_total: int
    ended_requests_total: int
    failed_lanes_total: int
    step_seconds_total: float
    """Time in steps that computed something, seconds."""
