"""Lark rules of tool calls: names, arguments and their types as the tools declare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.chat.argument_forms import (
    ANNOTATIONS,
    DEFINITIONS,
    JSON_STYLE,
    TEXT_RULE,
    ArgumentForm,
    NoPlainFormError,
    argument_forms,
    json_expression,
    literal,
)
from model.chat.markers import CLOSE, OPEN, SEP
from model.chat.segments import escape_attribute
from model.chat.values import Tool

_PLAIN_KEYWORDS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
_ANCHORS = ("$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor")
_INDEX = "/[1-9][0-9]{0,2}/"
_CALL_END = "call_end"
_ARGUMENT_END = "argument_end"
_BLOCK = 'json type="object"'


@dataclass(frozen=True, slots=True)
class _Argument:
    key: str
    forms: Sequence[ArgumentForm]
    is_required: bool


def tools_rules(tools: Sequence[Tool], *, several: bool) -> list[str]:
    """Rules of a `tools` element with at least one call; the first one is named `tools`.

    A tool whose parameters are a plain object of properties takes them in declared order, each with
    the type that its schema allows. Other parameters are written as one JSON block.

    Args:
        tools: The tools that may be called; at least one.
        several: Whether more than one call may be made.

    Raises:
        RecursionError: A schema is nested too deeply to be written.
    """
    names = " | ".join(f"call_{place}" for place in range(len(tools)))
    calls = f"({names})+" if several else f"({names})"
    rules = [
        f"tools: {opening('tools')} {calls} {closing('tools')}",
        f"{_CALL_END}: {closing('call')}",
        f"{_ARGUMENT_END}: {closing('argument')}",
    ]
    # Many tools say the same; written once, twice as many fit into a constraint.
    values: dict[str, str] = {}
    for place, tool in enumerate(tools):
        rules += _call_rules(tool, f"call_{place}", values, several=several)
    return [*rules, *(f"{name}: {expression}" for expression, name in values.items())]


def opening(header: str) -> str:
    """Lark expression of an opening tag; `header` is its name with attributes."""
    return f"{OPEN} {literal(header)} {SEP}"


def closing(tag: str) -> str:
    """Lark expression of a closing tag."""
    return f"{CLOSE} {literal(tag)} {SEP}"


def _call_rules(tool: Tool, rule: str, values: dict[str, str], *, several: bool) -> Iterator[str]:
    """Rules of a call of one tool; adds to the rules of values, by expression."""
    index = _INDEX if several else literal("1")
    head = literal(f'call tool="{escape_attribute(tool.name)}" index="')
    begin = f"{OPEN} {head} {index} {literal(chr(34))} {SEP}"
    try:
        arguments = _plain_arguments(tool.parameters)
    except NoPlainFormError:
        block = json_expression({**tool.parameters, "type": "object"}, JSON_STYLE)
        yield f"{rule}_json: {block}"
        body = f"{opening(_BLOCK)} {rule}_json {closing('json')}"
        yield f"{rule}: {begin} {body} {_CALL_END}"
        return
    body = ""
    for place, argument in enumerate(arguments):
        name = f"{rule}_{place}"
        body += f"{name} " if argument.is_required else f"{name}? "
        yield f"{name}: {_argument(argument, values)}"
    yield f"{rule}: {begin} {body}{_CALL_END}"


def _argument(argument: _Argument, values: dict[str, str]) -> str:
    """Lark expression of one argument: an alternative per type."""
    alternatives = []
    for form in argument.forms:
        value = form.expression
        if value != TEXT_RULE:
            value = values.setdefault(value, f"value_{len(values)}")
        header = f'argument key="{escape_attribute(argument.key)}" type="{form.type_name}"'
        alternatives.append(f"{opening(header)} {value} {_ARGUMENT_END}")
    return " | ".join(alternatives)


def _plain_arguments(parameters: Mapping[str, Any]) -> list[_Argument]:
    """Arguments of a plain object of properties, in declared order.

    Raises:
        NoPlainFormError: The parameters are something else.
    """
    keywords = parameters.keys() - ANNOTATIONS
    if not keywords <= _PLAIN_KEYWORDS or parameters.get("type", "object") != "object":
        raise NoPlainFormError("not only properties")
    if keywords and "properties" not in keywords:
        raise NoPlainFormError("any object")
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    definitions = {key: parameters[key] for key in DEFINITIONS if key in parameters}
    if (
        not isinstance(properties, Mapping)
        or not isinstance(required, list | tuple)
        or not all(isinstance(found, Mapping) for found in definitions.values())
        or any(name not in properties for name in required)
    ):
        raise NoPlainFormError("properties that are no object, or required ones without a schema")
    if not properties and parameters.get("additionalProperties", False) is not False:
        raise NoPlainFormError("an object used as a map")
    _check_references([properties, definitions])
    arguments = []
    for key, schema in properties.items():
        forms = argument_forms(schema, definitions)
        if forms:
            arguments.append(_Argument(key, forms, key in required))
        elif key in required:
            raise NoPlainFormError("a required property that allows no value")
    return arguments


def _check_references(value: object) -> None:
    """Refuse references that mean something else once a property stands alone."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key in _ANCHORS:
                raise NoPlainFormError("anchors")
            if key == "$ref" and not str(item).startswith(tuple(f"#/{k}/" for k in DEFINITIONS)):
                raise NoPlainFormError("a reference to somewhere else")
            _check_references(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_references(item)
