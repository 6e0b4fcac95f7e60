"""What a conversation must be before it can be rendered or constrained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.errors import InvalidRequestError
from model.chat.values import Conversation, Message, Role, Tool, ToolChoice


def check_conversation(conversation: Conversation) -> None:
    """Refuse a conversation whose parts contradict each other.

    Raises:
        InvalidRequestError: Names the message or the field.
    """
    _check_tools(conversation.tools, where="tools")
    for index, message in enumerate(conversation.messages):
        _check_message(message, where=f"messages[{index}]")
    _check_choice(conversation)


def declared_tools(conversation: Conversation) -> dict[str, Tool]:
    """All tools by name, also those that system messages add; a later declaration wins."""
    tools = [*conversation.tools]
    for message in conversation.messages:
        tools += message.tools
    return {tool.name: tool for tool in tools}


def _check_tools(tools: Sequence[Tool], *, where: str) -> None:
    for index, tool in enumerate(tools):
        function = tool.declaration.get("function")
        if not isinstance(function, Mapping):
            raise InvalidRequestError(f"{where}[{index}] has no function object; declare one")
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise InvalidRequestError(
                f"{where}[{index}].function.name is {name!r}; give the function a name"
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise InvalidRequestError(
                f"{where}[{index}].function.parameters is a {type(parameters).__name__}; "
                "send a JSON Schema object or leave it out"
            )


def _check_message(message: Message, *, where: str) -> None:
    if message.role is not Role.ASSISTANT and (message.tool_calls or message.reasoning):
        raise InvalidRequestError(
            f"{where} of role {message.role.value} has tool calls or reasoning; only an assistant "
            "has them"
        )
    if message.tools:
        if message.role is not Role.SYSTEM:
            raise InvalidRequestError(
                f"{where} of role {message.role.value} declares tools; only a system message does"
            )
        if any(message.content):
            raise InvalidRequestError(
                f"{where} declares tools and has content; a message that declares tools has no "
                "text of its own, so send two messages"
            )
        _check_tools(message.tools, where=f"{where}.tools")
    for index, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidRequestError(f"{where}.tool_calls[{index}] has no function name")


def _check_choice(conversation: Conversation) -> None:
    tools = declared_tools(conversation)
    forced = conversation.forced_tool
    if forced and conversation.tool_choice is ToolChoice.NONE:
        raise InvalidRequestError(
            f"tool_choice forces {forced!r} and forbids tools at once; choose one"
        )
    if forced and forced not in tools:
        raise InvalidRequestError(
            f"tool_choice names {forced!r}, which is none of the {len(tools)} declared tools; "
            "declare it"
        )
    if conversation.tool_choice is ToolChoice.REQUIRED and not tools:
        raise InvalidRequestError("tool_choice is required and no tool is declared; declare one")
