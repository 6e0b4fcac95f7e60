"""The grammar that an answer must follow, from its first token after the generation prefix."""

from __future__ import annotations

from collections.abc import Mapping

from configs.errors import InvalidRequestError
from model.chat.argument_forms import JSON_STYLE, TEXT_RULE, json_expression
from model.chat.call_grammar import closing, opening, tools_rules
from model.chat.conversation_check import check_conversation, declared_tools
from model.chat.values import Conversation, ToolChoice
from model.constraint import MAX_NESTING, Constraint, ConstraintKind

_RESPONSE_STYLE: Mapping[str, object] = {**JSON_STYLE, "lenient": False}
"""One line: a model that may put space anywhere can go on with it for ever."""


def chat_constraint(conversation: Conversation) -> Constraint | None:
    """Return the Lark grammar of the answer, or None when nothing constrains it.

    A response format constrains the visible response. `required` and a forced tool ask for at least
    one well-formed call of a declared tool; the response before it is then free, or, with a
    response format, JSON or empty. Reasoning is always free text. The grammar ends with the closing
    of the message; the stop token follows from being allowed nothing else.

    Raises:
        InvalidRequestError: The conversation contradicts itself, or a schema is nested too deeply
            or is no JSON.
    """
    check_conversation(conversation)
    needs_call = bool(conversation.forced_tool) or conversation.tool_choice is ToolChoice.REQUIRED
    if conversation.response_format is None and not needs_call:
        return None
    _check_nesting(conversation)
    try:
        rules = _rules(conversation, needs_call=needs_call)
    except (RecursionError, TypeError, ValueError) as exc:
        raise InvalidRequestError(
            f"a schema cannot be written as a grammar ({exc}); send plain JSON"
        ) from exc
    return Constraint(ConstraintKind.GRAMMAR, "\n".join(rules) + "\n")


def _rules(conversation: Conversation, *, needs_call: bool) -> list[str]:
    tools = declared_tools(conversation)
    if conversation.tool_choice is ToolChoice.NONE:
        tools = {}
    if conversation.forced_tool:
        tools = {conversation.forced_tool: tools[conversation.forced_tool]}
    rules = [f"{TEXT_RULE}: /(?s:.*)/"]
    response = TEXT_RULE
    if conversation.response_format is not None:
        schema = conversation.response_format.schema
        wanted = {"type": "object"} if schema is None else schema
        rules.append(f"json_response: {json_expression(wanted, _RESPONSE_STYLE)}")
        response = "json_response"
    end = closing("response")
    body = f"{response} {end}"
    if needs_call:
        optional = "" if response == TEXT_RULE else "?"
        body = f"{response}{optional} {end} tools"
    elif tools:
        body = f"({response} {end} | {response}? {end} tools)"
    if tools:
        rules += tools_rules(list(tools.values()), several=conversation.allows_parallel_calls)
    thought = f"{TEXT_RULE} {closing('think')} {opening('response')} "
    prefix = thought if conversation.thinking else ""
    return [f"start: {prefix}{body} {closing('message')}", *rules]


def _check_nesting(conversation: Conversation) -> None:
    """Refuse schemas that are nested deeper than a grammar may be."""
    schemas: list[object] = [tool.parameters for tool in declared_tools(conversation).values()]
    if conversation.response_format is not None:
        schemas.append(conversation.response_format.schema)
    for _ in range(MAX_NESTING):
        schemas = [child for schema in schemas for child in _children(schema)]
        if not schemas:
            return
    raise InvalidRequestError(
        f"a schema of a tool or of the response is nested deeper than {MAX_NESTING} levels; "
        "flatten it"
    )


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
