"""What answers look like, for the OpenAPI document. The answers themselves are plain dicts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    """Value, limit and next step."""
    type: str
    param: str | None
    """The field concerned."""
    code: str
    """Stable; docs/consumers/errors.md lists them."""


class ErrorReply(BaseModel):
    """Body of every error."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Where prompt tokens came from."""

    cached_tokens: int


class UsageReply(BaseModel):
    """What a request cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ModelReply(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelListReply(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelReply]


class FunctionReply(BaseModel):
    """A called function."""

    name: str
    arguments: str


class CallReply(BaseModel):
    """A call."""

    id: str
    type: Literal["function"]
    function: FunctionReply


class MessageReply(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    refusal: None
    tool_calls: list[CallReply] = []


class ChatChoiceReply(BaseModel):
    """One answer."""

    index: int
    message: MessageReply
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatReply(BaseModel):
    """Answer of POST /v1/chat/completions without `stream`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceReply]
    usage: UsageReply


class TextChoiceReply(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class TextReply(BaseModel):
    """Answer of POST /v1/completions without `stream`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoiceReply]
    usage: UsageReply


class HealthReply(BaseModel):
    """Whether requests are taken."""

    status: Literal["serving", "not_serving"]
    gateway: str
    connected_attention_workers: int
    running_requests: int
