"""Checks of a request before a worker sees it. Pure; every error names field, value and range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cluster.api.params import GenerateParams, SamplingParams, StopParams
from configs.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    TokenizerMissingError,
    UnknownModelError,
)

MAX_SEED: Final = (1 << 64) - 1
MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 20
"""Most likely tokens per position at most."""
MAX_PROMPT_LOGPROB_VALUES: Final = 1 << 20
"""Log-probabilities of one prompt: they are kept until its client has read them."""
MAX_STOP_TEXTS: Final = 64
MAX_STOP_CHARS: Final = 1024
MAX_ALL_STOP_CHARS: Final = 8192
"""Of all stop texts of a request together."""
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_LOGIT_BIASES: Final = 1024
MAX_BIAS: Final = 100.0
MAX_PENALTY: Final = 2.0
MAX_REPETITION_PENALTY: Final = 100.0
MAX_PRIORITY: Final = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are checked against."""

    model_name: str
    vocab_size: int
    context_tokens: int
    """Tokens of prompt and answer together."""
    has_tokenizer: bool


def check_generate(params: GenerateParams, limits: Limits) -> str | Sequence[int]:
    """Check everything but what depends on the tokens of a text, and return the prompt.

    Raises:
        InvalidRequestError: A field is out of range, or there are too many token ids.
        UnknownModelError: The model is not the served one.
        TokenizerMissingError: Text was sent, or stop texts or a constraint are asked for, and the
            checkpoint has no tokenizer.
    """
    prompt = check_prompt(params.model, params.prompt, limits, num_reserved=1)
    _check_sampling(params.sampling, limits)
    _check_stop(params.stop, limits)
    if params.max_tokens is not None and params.max_tokens < 1:
        raise InvalidRequestError(
            f"max_tokens is {params.max_tokens}; allowed: 1 to {limits.context_tokens}, or unset"
        )
    _check_range("num_choices", params.num_choices, 1, MAX_CHOICES)
    _check_range("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    _check_range("prompt_logprobs", params.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_range("priority", params.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_range("resume_offset", params.resume_offset, 0, limits.context_tokens)
    if params.resume_offset and params.num_choices > 1:
        raise InvalidRequestError(
            f"resume_offset is {params.resume_offset} and num_choices {params.num_choices}; only "
            "one answer can be resumed: set one of them to its default"
        )
    if params.constraint is not None and not limits.has_tokenizer:
        raise TokenizerMissingError(
            "a constraint was sent, but the checkpoint has no tokenizer files; leave it away"
        )
    if params.constraint is not None:
        _check_encodable("constraint", params.constraint.text)
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
        _check_encodable("text", prompt)
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
    if params.stop.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {params.stop.min_tokens}; allowed: 0 to max_tokens ({max_tokens})"
        )
    if not 0 <= params.resume_offset <= max_tokens:
        raise InvalidRequestError(
            f"resume_offset is {params.resume_offset}; allowed: 0 to max_tokens ({max_tokens})"
        )
    return max_tokens


def check_prompt_logprobs(num_prompt: int, params: GenerateParams) -> None:
    """Check that the log-probabilities of a prompt are not too many to keep.

    Raises:
        InvalidRequestError: They are.
    """
    if params.prompt_logprobs is None:
        return
    num_values = num_prompt * (params.prompt_logprobs + 1)
    if num_values > MAX_PROMPT_LOGPROB_VALUES:
        raise InvalidRequestError(
            f"prompt_logprobs {params.prompt_logprobs} of a prompt of {num_prompt} tokens are "
            f"{num_values} values; allowed: {MAX_PROMPT_LOGPROB_VALUES}; ask for fewer, or use "
            "Score"
        )


def _check_sampling(params: SamplingParams, limits: Limits) -> None:
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
    _check_range("min_p", params.min_p, 0, 1)
    penalty = params.repetition_penalty
    if penalty is not None and not 0 < penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequestError(
            f"repetition_penalty is {penalty}; allowed: above 0, at most {MAX_REPETITION_PENALTY:g}"
        )
    _check_range("presence_penalty", params.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", params.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if params.seed is not None and not 0 <= params.seed <= MAX_SEED:
        raise InvalidRequestError(f"seed is {params.seed}; allowed: 0 to {MAX_SEED}")
    _check_number("logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequestError(
                f"logit_bias names token {token_id}; allowed: 0 to {limits.vocab_size - 1}"
            )
        _check_range(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)


def _check_stop(params: StopParams, limits: Limits) -> None:
    _check_number("stop_token_ids", len(params.token_ids), MAX_STOP_TOKEN_IDS)
    _check_token_ids("stop_token_ids", params.token_ids, limits)
    _check_number("stop", len(params.texts), MAX_STOP_TEXTS)
    if params.texts and not limits.has_tokenizer:
        raise TokenizerMissingError(
            "stop texts were sent, but the checkpoint has no tokenizer files; send stop_token_ids"
        )
    for index, text in enumerate(params.texts):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop[{index}] has {len(text)} characters; allowed: 1 to {MAX_STOP_CHARS}"
            )
        _check_encodable(f"stop[{index}]", text)
    num_chars = sum(map(len, params.texts))
    if num_chars > MAX_ALL_STOP_CHARS:
        raise InvalidRequestError(
            f"stop has {num_chars} characters in all; allowed: 0 to {MAX_ALL_STOP_CHARS}; send "
            "fewer or shorter ones"
        )
    _check_range("min_tokens", params.min_tokens, 0, limits.context_tokens)


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    """Refuse what is outside the range, NaN too; None is unset."""
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(f"{field} is {value}; allowed: {low:g} to {high:g}")


def _check_encodable(field: str, text: str) -> None:
    """Refuse half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequestError(
            f"{field} has half of a surrogate pair, U+{ord(text[exc.start]):04X}, at character "
            f"{exc.start}; send whole characters"
        ) from exc


def _check_number(field: str, number: int, limit: int) -> None:
    if number > limit:
        raise InvalidRequestError(f"{field} has {number} entries; allowed: 0 to {limit}")


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
