"""Literal texts of the system notes. They are constants of the protocol: K3 was trained on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from configs.errors import InvalidRequestError
from model.chat.values import ResponseFormat, ThinkingEffort, Tool

REQUIRED_TOOLS = (
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
)
NO_TOOLS = (
    "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message."
)

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def tool_declaration(tools: Sequence[Tool]) -> str:
    """Text that declares the tools of a conversation."""
    return _TOOLS + _fenced([tool.declaration for tool in tools])


def more_tools_declaration(tools: Sequence[Tool]) -> str:
    """Text that declares tools in the middle of a conversation."""
    return _MORE_TOOLS + _fenced([tool.declaration for tool in tools])


def effort_note(effort: ThinkingEffort) -> str:
    """Text that states how much to think."""
    return _EFFORT.format(effort=effort.value)


def format_note(response_format: ResponseFormat) -> str:
    """Text that asks for JSON."""
    if response_format.schema is None:
        return _FORMAT.format(kind="json_object")
    return _FORMAT.format(kind="json_schema") + _SCHEMA + _fenced(response_format.schema)


def _fenced(value: object) -> str:
    """Compact JSON with sorted keys in a code fence.

    Raises:
        InvalidRequestError: The value is nested too deeply or is no JSON.
    """
    try:
        text = json.dumps(_sorted_deep(value), ensure_ascii=False, separators=(",", ":"))
    except (RecursionError, TypeError, ValueError) as exc:
        raise InvalidRequestError(
            f"a tool or a response schema is no JSON that can be written ({exc}); "
            "send plain JSON, nested less deeply"
        ) from exc
    return f"```json\n{text}\n```"


def _sorted_deep(value: object) -> object:
    """Copy of JSON in which all keys are sorted, so that equal tools give equal prompts."""
    if isinstance(value, Mapping):
        return {key: _sorted_deep(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted_deep(item) for item in value]
    return value
