"""A conversation and the parts of an answer, as frozen values without any protocol's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ThinkingEffort(StrEnum):
    """How much the model is asked to think; `max` is what the release defaults to."""

    LOW = "low"
    HIGH = "high"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    declaration: Mapping[str, Any]
    """The whole declaration as JSON, as the client sent it: `{"type": "function", "function":
    {"name": ..., "description": ..., "parameters": {JSON Schema}}}`."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(self.declaration["function"]["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of its arguments; empty when none is declared."""
        found: Mapping[str, Any] | None = self.declaration["function"].get("parameters")
        return {} if found is None else found


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made."""

    id: str
    name: str
    arguments: str
    """JSON text; what is no JSON object is rendered as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: Sequence[str] = ()
    """Texts; each is encoded on its own, as the release does with content parts."""
    name: str = ""
    reasoning: str = ""
    """What an assistant thought; past thinking is kept."""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    """Which call a tool's message answers."""
    tools: Sequence[Tool] = ()
    """Tools that a system message adds in the middle of a conversation."""


class ToolChoice(StrEnum):
    """Whether the next answer calls tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """JSON that the visible answer must be."""

    schema: Mapping[str, Any] | None = None
    """None is any JSON object."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that a prompt is made of."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    forced_tool: str = ""
    """Name of the only tool that may and must be called; "" has none."""
    allows_parallel_calls: bool = True
    response_format: ResponseFormat | None = None
    thinking: bool = True
    effort: ThinkingEffort | None = None
    """None renders no note."""


# What an answer says, in order. Joined, the texts of one kind are that part of the answer.


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """One whole call; malformed ones come as `TextDelta` instead."""

    index: int
    """Of the call in this answer, from 0."""
    name: str
    arguments: str
    """JSON text of an object."""


ChatDelta = ReasoningDelta | TextDelta | ToolCallDelta
