"""Constraints on an answer: from what a client writes to a grammar that a worker can apply.

Grammars are llguidance's. Their text is bounded here; what they may cost to build and to follow is
bounded by `PARSER_LIMITS`, and by `check_cost` where that does not count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from llguidance import LLMatcher, grammar_from

from configs.errors import InvalidRequestError
from model.constraint_cost import check_cost

MAX_CONSTRAINT_CHARS: Final = 64 << 10
MAX_CHOICES: Final = 1000
MAX_NESTING: Final = 64
"""Deepest nesting of a JSON Schema."""
MAX_REASON_CHARS: Final = 300


class ConstraintKind(StrEnum):
    """How a constraint on the answer is written."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON text."""
    JSON_OBJECT = "json_object"
    """Any JSON object; `text` is empty."""
    REGEX = "regex"
    """A regular expression that the whole answer matches (Rust syntax, no look-around)."""
    GRAMMAR = "grammar"
    """A Lark grammar as llguidance takes it, or GBNF."""
    CHOICE = "choice"
    """One of several texts; `text` is a JSON list of strings."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the answer must match from its first token on."""

    kind: ConstraintKind
    text: str = ""


def compile_constraint(constraint: Constraint) -> str:
    """Return the grammar of a constraint, for `ConstraintVocabulary`.

    JSON is compact: a model that may put spaces and line breaks anywhere can go on with them for
    ever.

    Raises:
        InvalidRequestError: It is too large, or not what its kind says. A grammar that only the
            vocabulary can judge is judged by `ConstraintVocabulary.check`.
    """
    if len(constraint.text) > MAX_CONSTRAINT_CHARS:
        raise InvalidRequestError(
            f"constraint {constraint.kind} has {len(constraint.text)} characters; allowed: "
            f"{MAX_CONSTRAINT_CHARS}"
        )
    if constraint.kind in (ConstraintKind.JSON_SCHEMA, ConstraintKind.GRAMMAR):
        check_cost(constraint.text)
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _json_grammar({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            return _json_grammar(_read_schema(constraint.text))
        case ConstraintKind.CHOICE:
            return _from("choice", json.dumps(_read_choices(constraint.text)), constraint.kind)
        case ConstraintKind.REGEX:
            _check_filled(constraint)
            return _from("regex", constraint.text, constraint.kind)
        case ConstraintKind.GRAMMAR:
            _check_filled(constraint)
            return _from("grammar", constraint.text, constraint.kind)


def refusal_of(kind: str, reason: str) -> InvalidRequestError:
    """Return the error for a constraint that the grammar engine refuses for `reason`."""
    # A bug or a stack overflow of the engine, which it survives; the rest is a backtrace.
    is_panic = reason.startswith("panic")
    text = "it is too complex" if is_panic else " ".join(reason.split())
    if len(text) > MAX_REASON_CHARS:
        text = f"{text[:MAX_REASON_CHARS]}..."
    return InvalidRequestError(f"{kind} cannot be used as a constraint: {text}")


def _json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def _from(form: Any, text: str, kind: ConstraintKind) -> str:  # noqa: ANN401 - a literal of llguidance
    try:
        return grammar_from(form, text)
    except ValueError as exc:
        raise refusal_of(kind, str(exc)) from exc


def _check_filled(constraint: Constraint) -> None:
    if not constraint.text.strip():
        raise InvalidRequestError(f"{constraint.kind} is empty; at least 1 character is needed")


def _read_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:
        raise refusal_of("json_schema", f"it is not JSON: {exc}") from exc
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise refusal_of("json_schema", f"it is {type(schema).__name__}; expected an object")
    _check_nesting(schema)
    _check_encodable(schema)
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _check_encodable(schema: dict[str, Any]) -> None:
    try:
        json.dumps(schema, ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        # Python reads such an escape; it is no character, and the grammar engine refuses it.
        raise refusal_of("json_schema", "it holds half a surrogate pair") from exc


def _check_nesting(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_NESTING):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise refusal_of("json_schema", f"it is nested deeper than {MAX_NESTING} levels")


def _children(value: Any) -> list[Any]:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _read_choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise refusal_of("choice", f"it is not a JSON list: {exc}") from exc
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise refusal_of("choice", "it is no list of texts")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"choice has {len(choices)} texts; allowed: 1 to {MAX_CHOICES}")
    if not all(choices):
        raise InvalidRequestError("choice holds an empty text; each needs at least 1 character")
    return choices
