"""The request of a chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from cluster.api.openai.request_fields import MAX_COUNT, Body, RequestFields, TopLogprobs
from configs.errors import InvalidRequestError
from model.chat.values import (
    Conversation,
    Message,
    ResponseFormat,
    Role,
    ThinkingEffort,
    Tool,
    ToolCall,
    ToolChoice,
)

Name = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Body):
    """A text in a message."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart] | None


class CalledFunction(Body):
    """What was called."""

    name: Name
    arguments: str
    """JSON text."""


class PastCall(Body):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDeclaration(Body):
    """A function that may be called."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments."""
    strict: bool | None = None
    """Accepted; a call that is forced always matches the schema."""


class ToolDeclaration(Body):
    """A tool."""

    type: Literal["function"]
    function: FunctionDeclaration

    def to_tool(self) -> Tool:
        """Return it as the model is told of it."""
        return Tool(self.model_dump(exclude_unset=True))


class ChatMessage(Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    """What the assistant thought; send it back, K3 keeps past thinking."""
    tool_calls: list[PastCall] | None = None
    tool_call_id: str | None = None
    """Which call this message of role `tool` answers."""
    refusal: None = None
    """Accepted, so that answers can be sent back as they came."""
    tools: list[ToolDeclaration] | None = None
    """Tools that a system message adds."""

    def to_message(self) -> Message:
        """Return the message."""
        role = Role.SYSTEM if self.role == "developer" else Role(self.role)
        return Message(
            role=role,
            content=_texts(self.content),
            name=self.name or "",
            reasoning=self.reasoning_content or "",
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id or "",
            tools=tuple(tool.to_tool() for tool in self.tools or ()),
        )


class NamedFunction(Body):
    """A function's name."""

    name: Name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """A schema with its name."""

    name: Annotated[str, Field(max_length=256)] = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Accepted; the answer always matches the schema."""


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class TemplateOptions(Body):
    """How the prompt is made."""

    thinking: bool = True
    """Whether the model thinks before it answers."""


class ChatRequest(RequestFields):
    """Request of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[ToolDeclaration] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    """False allows one call at most when calls are forced."""
    response_format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat | None, Field(discriminator="type")
    ] = None
    reasoning_effort: Literal["none", "low", "medium", "high", "max"] | None = None
    """`none` does not think; `medium` is not offered by K3 and counts as `high`."""
    chat_template_kwargs: TemplateOptions | None = None
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_COUNT)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=MAX_COUNT)] = None
    """The same as max_tokens; set one of them."""
    logprobs: bool | None = None
    top_logprobs: TopLogprobs = None
    """Needs `logprobs`."""
    store: bool | None = None
    """Accepted; nothing is stored."""
    prompt_cache_key: str | None = None
    """Accepted and ignored."""
    safety_identifier: str | None = None
    """Accepted and ignored."""

    @property
    def thinking(self) -> bool:
        """Whether the model thinks before it answers."""
        if self.reasoning_effort == "none":
            return False
        return self.chat_template_kwargs is None or self.chat_template_kwargs.thinking

    @property
    def token_limit(self) -> int | None:
        """Tokens to generate at most.

        Raises:
            InvalidRequestError: Both fields are set and differ.
        """
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens "
                f"{self.max_completion_tokens}; set one of them"
            )
        return self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report per token; None reports nothing.

        Raises:
            InvalidRequestError: `top_logprobs` without `logprobs`.
        """
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs is not None:
            raise InvalidRequestError(
                f"top_logprobs is {self.top_logprobs} and logprobs is not set; set it to true"
            )
        return None

    def to_conversation(self) -> Conversation:
        """Return what the prompt is made of.

        Raises:
            InvalidRequestError: `structured_outputs` with tools or a response format.
        """
        forced = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""
        choice = ToolChoice.AUTO
        if isinstance(self.tool_choice, str):
            choice = ToolChoice(self.tool_choice)
        return Conversation(
            messages=tuple(message.to_message() for message in self.messages),
            tools=tuple(tool.to_tool() for tool in self.tools or ()),
            tool_choice=ToolChoice.REQUIRED if forced else choice,
            forced_tool=forced,
            allows_parallel_calls=self.parallel_tool_calls is not False,
            response_format=_read_format(self.response_format),
            thinking=self.thinking,
            effort=self._effort() if self.thinking else None,
        )

    def _effort(self) -> ThinkingEffort | None:
        match self.reasoning_effort:
            case None | "none":
                return None
            case "medium":
                return ThinkingEffort.HIGH
            case effort:
                return ThinkingEffort(effort)


def _texts(content: Content) -> Sequence[str]:
    if content is None:
        return ()
    return (content,) if isinstance(content, str) else tuple(part.text for part in content)


def _read_format(
    wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> ResponseFormat | None:
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.schema_
        return ResponseFormat({} if schema is None else schema)
    return ResponseFormat() if isinstance(wanted, JsonObjectFormat) else None
