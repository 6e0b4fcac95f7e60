"""Checks of a request before a worker sees it. Pure; every error names field, value and range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from configs.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    TokenizerMissingError,
    UnknownModelError,
)

MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    model_name: str
    vocab_size: int
    context_tokens: int
    """Tokens of prompt and answer together."""
    has_tokenizer: bool


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """A generation as the client asked for it; None is unset."""

    prompt: str | Sequence[int] | None
    """Text or token ids; None when the client sent neither."""
    model: str = ""
    """Empty takes the served one."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    resume_offset: int = 0


@dataclass(frozen=True, slots=True)
class ScoreParams:
    """A score as the client asked for it."""

    prompt: str | Sequence[int] | None
    model: str = ""


def check_generate(params: GenerateParams, limits: Limits) -> str | Sequence[int]:
    """Check everything but what depends on the tokens of a text, and return the prompt.

    Raises:
        InvalidRequestError: A field is out of range, or there are too many token ids.
        UnknownModelError: The model is not the served one.
        TokenizerMissingError: Text was sent and the checkpoint has no tokenizer.
    """
    prompt = check_prompt(params.model, params.prompt, limits, num_reserved=1)
    _check_sampling(params)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}; allowed: 1 to {limits.context_tokens}, or unset"
        )
    _check_token_ids("stop_token_ids", params.stop_token_ids, limits)
    return prompt


def check_prompt(
    model: str, prompt: str | Sequence[int] | None, limits: Limits, *, num_reserved: int = 0
) -> str | Sequence[int]:
    """Check model and prompt, the length of text left out, and return the prompt.

    Args:
        model: Name that the client asks for; empty takes the served one.
        prompt: Text or token ids; None when the client sent neither.
        limits: What is checked against.
        num_reserved: Tokens that the context has to hold beside token ids.

    Raises:
        InvalidRequestError: No prompt, an empty one, more token ids than the context holds, or one
            of them out of range.
        UnknownModelError: The model is not the served one.
        TokenizerMissingError: Text was sent and the checkpoint has no tokenizer.
    """
    if model not in ("", limits.model_name):
        raise UnknownModelError(
            f"model {model!r} is not served here; served: {limits.model_name!r} (or leave it empty)"
        )
    if prompt is None:
        raise InvalidRequestError("prompt is unset; set exactly one of text and token_ids")
    if isinstance(prompt, str):
        if not limits.has_tokenizer:
            raise TokenizerMissingError(
                "text was sent, but the checkpoint has no tokenizer files; send token_ids in "
                f"[0, {limits.vocab_size})"
            )
        if not prompt:
            raise InvalidRequestError("text is empty; at least 1 character is needed")
        return prompt
    if not prompt:
        raise InvalidRequestError("token_ids is empty; at least 1 token is needed")
    # Before the ids are looked at: a message may hold millions, and every stream would wait.
    check_prompt_length(len(prompt), limits, num_reserved=num_reserved)
    _check_token_ids("token_ids", prompt, limits)
    return prompt


def check_prompt_length(num_prompt: int, limits: Limits, *, num_reserved: int) -> None:
    """Check that the context holds the prompt and `num_reserved` tokens more.

    Raises:
        InvalidRequestError: It does not.
    """
    if num_prompt + num_reserved > limits.context_tokens:
        raise InvalidRequestError(
            f"prompt has {num_prompt} tokens; allowed: 1 to "
            f"{limits.context_tokens - num_reserved} (context of {limits.context_tokens} tokens)"
        )


def resolve_max_tokens(
    num_prompt: int, params: GenerateParams, limits: Limits, *, worker_tokens: int
) -> int:
    """Return the tokens to generate at most; unset takes what context and workers leave.

    Args:
        num_prompt: Tokens of the prompt.
        params: The request.
        limits: The model's limits.
        worker_tokens: Tokens of prompt and answer that the roomiest connected worker can hold.

    Raises:
        InvalidRequestError: Prompt and answer exceed the context, or `resume_offset` the answer.
        RequestTooLargeError: They fit the context, but no worker.
    """
    check_prompt_length(num_prompt, limits, num_reserved=1)
    room = limits.context_tokens - num_prompt
    worker_room = worker_tokens - num_prompt
    if params.max_tokens is not None and params.max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}; allowed: 1 to {room} (context of "
            f"{limits.context_tokens} tokens, prompt of {num_prompt})"
        )
    max_tokens = min(room, worker_room) if params.max_tokens is None else params.max_tokens
    if worker_room < 1 or max_tokens > worker_room:
        raise RequestTooLargeError(
            f"prompt of {num_prompt} tokens and max_tokens {max(max_tokens, 1)} exceed the "
            f"{worker_tokens} tokens that fit a worker's memory; shorten one of them, or raise "
            "attention_pool.num_blocks"
        )
    if params.resume_offset > max_tokens:
        raise InvalidRequestError(
            f"resume_offset is {params.resume_offset}; allowed: 0 to max_tokens ({max_tokens})"
        )
    return max_tokens


def _check_sampling(params: GenerateParams) -> None:
    if params.temperature is not None and not (
        math.isfinite(params.temperature) and params.temperature >= 0
    ):
        raise InvalidRequestError(
            f"temperature is {params.temperature}; allowed: finite and >= 0 (0 is greedy)"
        )
    if params.top_p is not None and not 0 < params.top_p <= 1:
        raise InvalidRequestError(f"top_p is {params.top_p}; allowed: above 0, at most 1")
    if params.top_k is not None and params.top_k < 0:
        raise InvalidRequestError(f"top_k is {params.top_k}; allowed: >= 0 (0 keeps all)")
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise InvalidRequestError(f"seed is {params.seed}; allowed: 0 to {MAX_SEED}")
    if params.resume_offset < 0:
        raise InvalidRequestError(
            f"resume_offset is {params.resume_offset}; allowed: 0 to max_tokens"
        )


def _check_token_ids(field: str, token_ids: Sequence[int], limits: Limits) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
        return
    index, value = next(
        (index, value)
        for index, value in enumerate(token_ids)
        if not 0 <= value < limits.vocab_size
    )
    raise InvalidRequestError(
        f"{field}[{index}] is {value}; allowed: 0 to {limits.vocab_size - 1} (vocabulary of "
        f"{limits.vocab_size})"
    )
