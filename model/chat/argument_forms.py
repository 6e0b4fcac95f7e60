"""How one tool argument may be written: by type, as Lark expressions.

A string stands as raw text, everything else as JSON, and the tag names the type. So a JSON Schema
that allows several types becomes several forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.chat.value_types import type_name

TEXT_RULE = "TEXT"
"""Terminal of the surrounding grammar that matches any text without special tokens."""

JSON_STYLE: Mapping[str, object] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": True,
}
"""Arguments are written as the model learned them, on one line. Keywords that llguidance does not
know are not enforced, because a tool's schema is advice: refusing the request would help nobody."""

JSON_TYPES = ("string", "number", "boolean", "null", "object", "array")
DEFINITIONS = ("$defs", "definitions")
ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "title",
        "description",
        "default",
        "deprecated",
        "example",
        "examples",
        "nullable",
        "readOnly",
        "strict",
        "writeOnly",
    }
)
"""Keywords that constrain nothing."""

_KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "propertyNames",
    },
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
}
_ALTERNATIVES = ("anyOf", "oneOf")
_MAX_DEPTH = 16


class NoPlainFormError(Exception):
    """A schema has no typed form that is known to be right; the JSON block takes it whole.

    Never leaves `model.chat`.
    """


@dataclass(frozen=True, slots=True)
class ArgumentForm:
    """One way to write a value."""

    type_name: str
    """What the tag says."""
    expression: str
    """Lark expression of the value."""


def argument_forms(
    schema: object, definitions: Mapping[str, Mapping[str, Any]]
) -> list[ArgumentForm]:
    """Forms of the values that a property's schema allows; empty when it allows none.

    `pattern` and `format` of strings are not enforced: raw text has no JSON to attach them to.

    Args:
        schema: The property's schema.
        definitions: What the root holds under `DEFINITIONS`, by keyword.

    Raises:
        NoPlainFormError: Schema combines keywords in a way that has no typed form.
    """
    return _Forms(definitions).of(schema, depth=0)


def has_reference(value: object) -> bool:
    """Whether a schema refers to another one anywhere."""
    if isinstance(value, Mapping):
        return "$ref" in value or any(map(has_reference, value.values()))
    return isinstance(value, list | tuple) and any(map(has_reference, value))


def literal(text: str) -> str:
    """A Lark string that matches exactly a text."""
    return json.dumps(text)


def json_expression(schema: Mapping[str, Any], style: Mapping[str, object]) -> str:
    """Lark expression of JSON that fits a schema.

    Raises:
        RecursionError: The schema is nested too deeply to be written.
    """
    return f"%json {json.dumps({**schema, 'x-guidance': dict(style)})}"


@dataclass(frozen=True, slots=True)
class _Forms:
    definitions: Mapping[str, Mapping[str, Any]]

    def of(self, schema: object, *, depth: int) -> list[ArgumentForm]:
        if depth > _MAX_DEPTH:
            raise NoPlainFormError("references or alternatives go too deep")
        if schema is False:
            return []
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise NoPlainFormError("not a schema")
        keywords = schema.keys() - ANNOTATIONS - {*DEFINITIONS}
        if keywords & {"enum", "const"}:
            return self._of_values(schema, keywords)
        if "type" not in keywords and len(keywords) == 1:
            (keyword,) = keywords
            if keyword == "$ref":
                return self.of(self._resolve(schema["$ref"]), depth=depth + 1)
            if keyword in _ALTERNATIVES or keyword == "allOf":
                return self._of_branches(keyword, schema[keyword], depth=depth + 1)
        return [self._of_type(name, schema, keywords) for name in _types(schema, keywords)]

    def _of_branches(self, keyword: str, branches: object, *, depth: int) -> list[ArgumentForm]:
        if not isinstance(branches, Sequence) or isinstance(branches, str) or not branches:
            raise NoPlainFormError("alternatives are no list")
        if keyword == "allOf" and len(branches) != 1:
            raise NoPlainFormError("an intersection")
        forms = [form for branch in branches for form in self.of(branch, depth=depth)]
        return list(dict.fromkeys(forms))

    def _of_values(self, schema: Mapping[str, Any], keywords: Iterable[str]) -> list[ArgumentForm]:
        """Forms of listed values: strings as literals, others as JSON."""
        if not {*keywords} <= {"enum", "const", "type"} or {"enum", "const"} <= {*keywords}:
            raise NoPlainFormError("listed values with other constraints")
        values = schema["enum"] if "enum" in keywords else [schema["const"]]
        if not isinstance(values, list | tuple):
            raise NoPlainFormError("an enum that is no list")
        allowed = _types(schema, keywords) if "type" in keywords else JSON_TYPES
        by_type: dict[str, list[Any]] = {}
        for value in values:
            name = type_name(value)
            if name in allowed or (name == "number" and "integer" in allowed):
                by_type.setdefault(name, []).append(value)
        texts = by_type.pop("string", None)
        forms = [
            ArgumentForm(name, json_expression({"enum": found}, JSON_STYLE))
            for name, found in by_type.items()
        ]
        if texts is not None:
            forms.append(ArgumentForm("string", f"({' | '.join(map(literal, texts))})"))
        return forms

    def _of_type(
        self, name: str, schema: Mapping[str, Any], keywords: Iterable[str]
    ) -> ArgumentForm:
        if name == "string":
            return ArgumentForm("string", _string(schema, keywords))
        reachable = self.definitions if has_reference(schema) else {}
        kept = {key: item for key, item in schema.items() if key not in ANNOTATIONS}
        narrowed = {**kept, **reachable, "type": name}
        tag = "number" if name == "integer" else name
        return ArgumentForm(tag, json_expression(narrowed, JSON_STYLE))

    def _resolve(self, reference: object) -> object:
        for keyword, found in self.definitions.items():
            prefix = f"#/{keyword}/"
            if isinstance(reference, str) and reference.startswith(prefix):
                name = reference.removeprefix(prefix)
                if name in found:
                    return found[name]
        raise NoPlainFormError("a reference that is no definition of the root")


def _types(schema: Mapping[str, Any], keywords: Iterable[str]) -> list[str]:
    """Types that a schema allows, or those that its keywords speak of when it names none."""
    if "type" not in keywords:
        found = [name for name, known in _KEYWORDS.items() if {*keywords} <= known]
        if not {*keywords}:
            return [*JSON_TYPES]
        if not found:
            raise NoPlainFormError("keywords of several types")
        return found
    named = schema["type"]
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and name in {*JSON_TYPES, "integer"} for name in names
    ):
        raise NoPlainFormError("a type that JSON does not have")
    unique = list(dict.fromkeys(names))
    return [name for name in unique if name != "integer" or "number" not in unique]


def _string(schema: Mapping[str, Any], keywords: Iterable[str]) -> str:
    """Raw text, with the limits on its length."""
    if not {*keywords} <= {"type"}.union(*_KEYWORDS.values()):
        raise NoPlainFormError("a string with a combination of schemas")
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    for limit in (shortest, longest):
        if limit is not None and (type(limit) is not int or limit < 0):
            raise NoPlainFormError("a length that is no count")
    if longest is None:
        return TEXT_RULE if shortest == 0 else f"/(?s:.{{{shortest},}})/"
    if longest < shortest:
        raise NoPlainFormError("no length is allowed")
    return f"/(?s:.{{{shortest},{longest}}})/"
