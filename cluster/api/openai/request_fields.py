"""Fields that both kinds of requests have, and how they become our own parameters.

A field that is not listed is refused by name: a request that ran without it would be another one.
Fields that change nothing of the answer are accepted and ignored. Ranges that
`cluster/api/validation.py` checks stand here for the OpenAPI document.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cluster.api.params import SamplingParams, StopParams
from cluster.api.validation import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_TEXTS,
    MAX_STOP_TOKEN_IDS,
)
from configs.errors import InvalidRequestError
from model.constraint import MAX_CHOICES as MAX_CHOICE_TEXTS
from model.constraint import MAX_CONSTRAINT_CHARS, Constraint, ConstraintKind

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
MAX_COUNT = (1 << 31) - 1


class Body(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class StreamOptions(Body):
    """How a stream is told."""

    include_usage: bool = False
    """Send what the request cost in a last event without choices."""
    include_obfuscation: bool = False
    """Accepted; nothing is padded."""


class StructuredOutputs(Body):
    """What the answer must match; exactly one of them."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    """JSON Schema, as an object or as text."""
    regex: Annotated[str | None, Field(max_length=MAX_CONSTRAINT_CHARS)] = None
    """Regular expression for the whole answer."""
    choice: Annotated[list[str] | None, Field(min_length=1, max_length=MAX_CHOICE_TEXTS)] = None
    """One of several texts."""
    grammar: Annotated[str | None, Field(max_length=MAX_CONSTRAINT_CHARS)] = None
    """Lark grammar or GBNF."""

    def to_constraint(self) -> Constraint:
        """Return the constraint.

        Raises:
            InvalidRequestError: None of them is set, or several are.
        """
        found: list[Constraint] = []
        if self.json_schema is not None:
            is_text = isinstance(self.json_schema, str)
            text = self.json_schema if is_text else json.dumps(self.json_schema)
            found.append(Constraint(ConstraintKind.JSON_SCHEMA, str(text)))
        if self.regex is not None:
            found.append(Constraint(ConstraintKind.REGEX, self.regex))
        if self.choice is not None:
            found.append(Constraint(ConstraintKind.CHOICE, json.dumps(self.choice)))
        if self.grammar is not None:
            found.append(Constraint(ConstraintKind.GRAMMAR, self.grammar))
        if len(found) != 1:
            raise InvalidRequestError(
                f"structured_outputs has {len(found)} of json, regex, choice and grammar; set "
                "exactly one"
            )
        return found[0]


class RequestFields(Body):
    """What completions and chat completions have in common."""

    model: Annotated[str, Field(max_length=256)] = ""
    """Name of the model; empty takes the one that is served."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is made."""
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    """Answers to the prompt."""
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    """0 is greedy; unset is 1."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_COUNT)] = None
    """Keep the k most likely tokens; 0 and -1 keep all."""
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    """Drop tokens less likely than this share of the most likely one."""
    presence_penalty: Annotated[float | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=MAX_REPETITION_PENALTY)] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] | None,
        Field(max_length=MAX_LOGIT_BIASES),
    ] = None
    """Added to logits, by token id."""
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    """The same request with the same seed gets the same answer."""
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOP_TEXTS)] | None = None
    """Texts that end the answer; they are no part of it."""
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_COUNT)]] | None,
        Field(max_length=MAX_STOP_TOKEN_IDS),
    ] = None
    include_stop_str_in_output: bool = False
    """Leave the stop text in the answer."""
    ignore_eos: bool = False
    """Do not stop at the model's own end tokens."""
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    """No end by a stop token or text before so many tokens."""
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Lower is served earlier."""
    user: str | None = None
    """Accepted and ignored."""
    metadata: dict[str, str] | None = None
    """Accepted and ignored."""
    service_tier: Literal["auto", "default"] | None = None
    """Accepted and ignored."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self) -> SamplingParams:
        """Return how tokens are chosen."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=None if self.top_k in (None, -1) else self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_read_bias(self.logit_bias or {}),
            seed=self.seed,
        )

    def stop_params(self) -> StopParams:
        """Return what ends the answer."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return StopParams(
            texts=tuple(texts),
            token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            include_text=self.include_stop_str_in_output,
        )

    def check_stream(self) -> None:
        """Refuse options of a stream where there is none.

        Raises:
            InvalidRequestError: `stream_options` without `stream`.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is set and stream is not; set stream to true")


TopLogprobs = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)]


def _read_bias(biases: dict[str, float]) -> dict[int, float]:
    read: dict[int, float] = {}
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidRequestError(
                f"logit_bias names {name[:40]!r}; expected a token id, e.g. '1234'"
            )
        read[int(name)] = bias
    return read
