"""From a conversation to the segments of its prompt. Pure; no vocabulary is needed."""

from __future__ import annotations

import json

from configs.errors import InvalidRequestError
from model.chat import notes
from model.chat.conversation_check import check_conversation
from model.chat.segments import END_SEGMENT, Segment, closing, opening, text_segments
from model.chat.tool_results import PlacedMessage, place_messages
from model.chat.value_types import type_name
from model.chat.values import Conversation, Message, Role, ToolCall, ToolChoice


def render_conversation(conversation: Conversation) -> list[Segment]:
    """Return all segments, up to and including the generation prefix.

    Order: tools, effort, messages, tool choice, response format, prefix. The last notes come after
    the history so that changing them keeps the cached prefix valid.

    Raises:
        InvalidRequestError: A message cannot be rendered; names it.
    """
    check_conversation(conversation)
    segments: list[Segment] = []
    if conversation.tools:
        segments += _note("tool-declare", notes.tool_declaration(conversation.tools))
    if conversation.thinking and conversation.effort is not None:
        segments += _note("thinking-effort", notes.effort_note(conversation.effort))
    for placed in place_messages(conversation.messages):
        segments += _message(placed, thinking=conversation.thinking)
    if conversation.forced_tool or conversation.tool_choice is ToolChoice.REQUIRED:
        segments += _note("tool-choice", notes.REQUIRED_TOOLS)
    elif conversation.tool_choice is ToolChoice.NONE:
        segments += _note("tool-choice", notes.NO_TOOLS)
    if conversation.response_format is not None:
        segments += _note("response-format", notes.format_note(conversation.response_format))
    segments += opening("message", [("role", Role.ASSISTANT.value)])
    segments += opening("think" if conversation.thinking else "response")
    return segments


def render_answer(message: Message, *, thinking: bool) -> list[Segment]:
    """Segments of an assistant's message after the generation prefix: what a model writes.

    Raises:
        InvalidRequestError: The arguments of a call are JSON, but no object.
    """
    prefix = len(opening("think"))
    segments = _assistant_body(message, thinking=thinking, where="message")[prefix:]
    return [*segments, *closing("message"), END_SEGMENT]


def _note(kind: str, text: str) -> list[Segment]:
    """A message that the server writes."""
    attributes = [("role", Role.SYSTEM.value), ("type", kind)]
    return [
        *opening("message", attributes),
        *text_segments(text),
        *closing("message"),
        END_SEGMENT,
    ]


def _message(placed: PlacedMessage, *, thinking: bool) -> list[Segment]:
    message = placed.message
    if message.tools:
        return _note("tool-declare", notes.more_tools_declaration(message.tools))
    attributes = [("role", message.role.value)]
    if message.role is Role.TOOL:
        attributes += [("tool", placed.tool), ("index", str(placed.result_index))]
    elif message.name:
        attributes.append(("name", message.name))
    if message.role is Role.ASSISTANT:
        body = _assistant_body(message, thinking=thinking, where=f"messages[{placed.index}]")
    else:
        body = text_segments(*message.content)
    return [*opening("message", attributes), *body, *closing("message"), END_SEGMENT]


def _assistant_body(message: Message, *, thinking: bool, where: str) -> list[Segment]:
    """Channels of an assistant's message; `think` stands in thinking mode even when empty."""
    segments: list[Segment] = []
    if thinking:
        reasoning = message.reasoning if message.reasoning.strip() else ""
        segments += [*opening("think"), *text_segments(reasoning), *closing("think")]
    segments += [*opening("response"), *text_segments(*message.content), *closing("response")]
    if message.tool_calls:
        segments += opening("tools")
        for place, call in enumerate(message.tool_calls):
            segments += _call(call, place + 1, where=f"{where}.tool_calls[{place}]")
        segments += closing("tools")
    return segments


def _call(call: ToolCall, index: int, *, where: str) -> list[Segment]:
    segments = opening("call", [("tool", call.name), ("index", str(index))])
    arguments = _typed_arguments(call.arguments, where=where)
    if arguments is None:
        segments += opening("json", [("type", "object")])
        segments += [*text_segments(call.arguments), *closing("json")]
        return [*segments, *closing("call")]
    for key, kind, value in arguments:
        segments += opening("argument", [("key", key), ("type", kind)])
        segments += [*text_segments(value), *closing("argument")]
    return [*segments, *closing("call")]


def _typed_arguments(text: str, *, where: str) -> list[tuple[str, str, str]] | None:
    """Key, type and text of every argument, or None for a text that is no JSON."""
    if not text.strip():
        return []
    try:
        parsed = json.loads(text)
        if isinstance(parsed, dict):
            return [(key, type_name(value), _value_text(value)) for key, value in parsed.items()]
    except (ValueError, RecursionError):
        return None
    raise InvalidRequestError(
        f"{where}: arguments are a JSON {type_name(parsed)}; a call needs an object"
    )


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
