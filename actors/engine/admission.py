"""Whether a request may enter the queue. Pure: limits and a request in, an error or None out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.request_channel import Sampling, Submit
from configs.errors import (
    AdmissionError,
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
)

MAX_SEED = (1 << 64) - 1
MAX_SHAPING = 1e6
"""Of penalties and biases: far from what float32 holds, so that no sum of them is infinite."""
MAX_TOP_LOGPROBS = 1000
"""So that those of a step's prompt rows fit one message."""
MAX_GRAMMAR_CHARS = 1 << 20
"""Of all answers to a prompt together: each builds its own, 0.3 s for the dearest 64 Ki."""


MAX_PRIORITY = 100
"""Either way."""


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """How much is kept of what was computed."""

    max_bytes: int = 0
    """Of state copies for reuse and of copies of preempted requests together; 0 keeps none."""
    interval_tokens: int = 2048
    """Prefill leaves a prefix snapshot at every multiple; a multiple of 16."""
    min_gain_tokens: int = 16
    """A prefix snapshot saves at least so many tokens beyond the one before it."""
    are_forms_distinct: bool = True
    """Whether what decode computed is no prefix of a prompt: under invariant numerics."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one attention worker can hold. All counts at least 1 unless stated."""

    vocab_size: int
    context_tokens: int
    """Longest prompt plus answer."""
    num_blocks: int
    block_tokens: int
    num_state_slots: int
    max_step_tokens: int
    """At least 16: one prefill tile."""
    max_queued_requests: int
    """May be 0: a request is then taken only while a slot and its blocks are free."""
    snapshots: SnapshotLimits = SnapshotLimits()

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer of one request that can ever fit."""
        return min(self.context_tokens, self.num_blocks * self.block_tokens)


def blocks_needed(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens`."""
    return -(-num_tokens // block_tokens)


def find_refusal(submit: Submit, limits: EngineLimits) -> AdmissionError | None:
    """Return why this worker can never run `submit`, or None."""
    refusal = _find_invalid_field(submit, limits)
    if refusal is not None:
        return refusal
    num_tokens = len(submit.token_ids) + submit.max_tokens
    if num_tokens > limits.context_tokens:
        return InvalidRequestError(
            f"prompt of {len(submit.token_ids)} tokens and max_tokens {submit.max_tokens} need "
            f"{num_tokens} tokens; the context is {limits.context_tokens}: shorten the prompt or "
            "lower max_tokens"
        )
    if num_tokens > limits.max_request_tokens:
        return RequestTooLargeError(
            f"request of {num_tokens} tokens needs "
            f"{blocks_needed(num_tokens, limits.block_tokens)} cache blocks; a worker has "
            f"{limits.num_blocks} of {limits.block_tokens} tokens: shorten it or raise "
            "attention_pool.num_blocks"
        )
    return None


def find_overload(num_waiting: int, limits: EngineLimits) -> OverloadedError | None:
    """Return an error if `num_waiting` requests, the new one included, may not wait for memory."""
    if num_waiting <= limits.max_queued_requests:
        return None
    return OverloadedError(
        f"{num_waiting} requests would wait for memory, the limit is "
        f"{limits.max_queued_requests}; try again later"
    )


def _find_invalid_field(submit: Submit, limits: EngineLimits) -> InvalidRequestError | None:
    """Return an error naming the first field that is out of range, its value and the range."""
    if not submit.token_ids:
        return InvalidRequestError("token_ids is empty; a prompt needs at least 1 token")
    for name, ids in (
        ("token_ids", submit.token_ids),
        ("generated_ids", submit.generated_ids),
        ("stop_token_ids", submit.stop_token_ids),
        ("logit_bias", list(submit.sampling.logit_bias)),
    ):
        refusal = _find_invalid_id(name, ids, limits.vocab_size)
        if refusal is not None:
            return refusal
    refusal = _find_invalid_count(submit)
    if refusal is None:
        refusal = _find_invalid_extra(submit, limits)
    return _find_invalid_sampling(submit.sampling) if refusal is None else refusal


def _find_invalid_count(submit: Submit) -> InvalidRequestError | None:
    if submit.want_logits and (submit.max_tokens != 0 or submit.generated_ids):
        return InvalidRequestError(
            f"a score generates nothing: max_tokens is {submit.max_tokens} and generated_ids has "
            f"{len(submit.generated_ids)} tokens, both must be 0"
        )
    if not submit.want_logits and submit.max_tokens < 1:
        return InvalidRequestError(f"max_tokens is {submit.max_tokens}; it must be at least 1")
    if submit.num_choices < 1 or (submit.num_choices > 1 and submit.want_logits):
        return InvalidRequestError(
            f"num_choices is {submit.num_choices}; it must be at least 1, and 1 for a score"
        )
    if submit.num_choices > 1 and submit.generated_ids:
        return InvalidRequestError(
            f"generated_ids has {len(submit.generated_ids)} tokens; with num_choices "
            f"{submit.num_choices} nothing can be replayed"
        )
    if submit.snapshot is not None and submit.num_choices > 1:
        return InvalidRequestError(
            f"a snapshot is of one answer; num_choices is {submit.num_choices}: send them apart"
        )
    if not -MAX_PRIORITY <= submit.priority <= MAX_PRIORITY:
        return InvalidRequestError(
            f"priority is {submit.priority}; it must be {-MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    if submit.attempt < 0:
        return InvalidRequestError(f"attempt is {submit.attempt}; it must be at least 0")
    if submit.credit_tokens < 0:
        return InvalidRequestError(f"credit_tokens is {submit.credit_tokens}; at least 0 is needed")
    if submit.timeout_s is not None and not math.isfinite(submit.timeout_s):
        return InvalidRequestError(f"timeout_s is {submit.timeout_s}; it must be finite seconds")
    return None


def _find_invalid_extra(submit: Submit, limits: EngineLimits) -> InvalidRequestError | None:
    for name, num_top in (
        ("logprobs", submit.logprobs),
        ("prompt_logprobs", submit.prompt_logprobs),
    ):
        if num_top is not None and not 0 <= num_top <= MAX_TOP_LOGPROBS:
            return InvalidRequestError(f"{name} is {num_top}; it must be 0 to {MAX_TOP_LOGPROBS}")
    num_chars = len(submit.grammar) * submit.num_choices
    if num_chars > MAX_GRAMMAR_CHARS:
        return InvalidRequestError(
            f"a constraint of {len(submit.grammar)} characters for {submit.num_choices} answers "
            f"makes {num_chars}; allowed: {MAX_GRAMMAR_CHARS}; ask for fewer answers at once"
        )
    min_tokens = submit.sampling.min_tokens
    if min_tokens > 0 and len(set(submit.stop_token_ids)) >= limits.vocab_size:
        return InvalidRequestError(
            f"stop_token_ids holds all {limits.vocab_size} tokens: with min_tokens {min_tokens} "
            "none is left to begin with; use fewer stop tokens"
        )
    return None


def _find_invalid_id(
    name: str, token_ids: Sequence[int], vocab_size: int
) -> InvalidRequestError | None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return None
    index, token_id = next(
        (i, token) for i, token in enumerate(token_ids) if not 0 <= token < vocab_size
    )
    return InvalidRequestError(
        f"{name}[{index}] is {token_id}; token ids of this model are 0 to {vocab_size - 1}"
    )


def _find_invalid_sampling(sampling: Sampling) -> InvalidRequestError | None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return InvalidRequestError(
            f"temperature is {sampling.temperature}; it must be finite and at least 0"
        )
    if not 0 < sampling.top_p <= 1:
        return InvalidRequestError(f"top_p is {sampling.top_p}; it must be in (0, 1]")
    if sampling.top_k < 0:
        return InvalidRequestError(f"top_k is {sampling.top_k}; it must be at least 0")
    if not 0 <= sampling.min_p <= 1:
        return InvalidRequestError(f"min_p is {sampling.min_p}; it must be 0 to 1")
    if not 1 / MAX_SHAPING <= sampling.repetition_penalty <= MAX_SHAPING:
        return InvalidRequestError(
            f"repetition_penalty is {sampling.repetition_penalty}; it must be "
            f"{1 / MAX_SHAPING:g} to {MAX_SHAPING:g}"
        )
    for name, value in (
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
        *((f"logit_bias[{token}]", bias) for token, bias in sampling.logit_bias.items()),
    ):
        if not -MAX_SHAPING <= value <= MAX_SHAPING:
            return InvalidRequestError(
                f"{name} is {value}; it must be -{MAX_SHAPING:g} to {MAX_SHAPING:g}"
            )
    for name, number in (("seed", sampling.seed), ("choice", sampling.choice)):
        if not 0 <= number <= MAX_SEED:
            return InvalidRequestError(f"{name} is {number}; it must be 0 to {MAX_SEED}")
    return None
