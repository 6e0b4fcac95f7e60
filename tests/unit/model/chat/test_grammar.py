"""Grammars of answers, proved by random walks: all that they allow is read back as valid."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from configs.errors import InvalidRequestError
from model.chat.grammar import chat_constraint
from model.chat.values import Conversation, Message, ResponseFormat, Role, Tool, ToolChoice
from model.constraint import MAX_NESTING, compile_constraint
from model.constraint_vocabulary import ConstraintVocabulary
from tests.fakes.chat_rig import BYTES, END, Answer, answer_ids, join, marked, read, tool

VOCABULARY = ConstraintVocabulary(BYTES, vocab_size=BYTES.vocab_size, eos_token_ids=[END])
MAX_TOKENS = 3000
NODE = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
    },
    "required": ["on"],
    "additionalProperties": False,
}


def an_object(required: tuple[str, ...] = (), **properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


PARAMETERS: dict[str, dict[str, Any]] = {
    "none declared": {},
    "no properties": an_object(),
    "any object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": {"type": "number"}},
    "plain": an_object(("city",), city={"type": "string"}, days={"type": "integer", "minimum": 1}),
    "only required": an_object(("a", "b"), a={"type": "null"}, b={"type": "boolean"}),
    "enum of texts": an_object(("u",), u={"type": "string", "enum": ["c", 'f"&<\n', ""]}),
    "mixed enum": an_object(("u",), u={"enum": [1, "x", None, True, {"a": [1]}, [2]]}),
    "const": an_object(("u",), u={"const": "yes"}),
    "lengths": an_object(("u",), u={"type": "string", "minLength": 2, "maxLength": 4}),
    "several types": an_object(("u",), u={"type": ["string", "null", "integer", "number"]}),
    "optional text": an_object(("u",), u={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "any value": an_object(("u",), u={}, v=True, w=False),
    "untyped keywords": an_object(("u",), u={"minimum": 3}),
    "nested": an_object(
        ("u",), u={"type": "array", "items": an_object(("x",), x={"type": "null"})}
    ),
    "definitions": {
        **an_object(("u",), u={"$ref": "#/$defs/Node"}, v={"type": "array", "maxItems": 1}),
        "$defs": {"Node": NODE},
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
    "recursive root": {**an_object(("v",), v={"type": "number"}, child={"$ref": "#"})},
    "combined": {**an_object(a={"type": "string"}), "anyOf": [{"required": ["a"]}]},
    "names to escape": an_object(('k"&\u00e9\n\U0001f600',), **{'k"&\u00e9\n\U0001f600': {}}),
}


def walk(conversation: Conversation, seed: int) -> list[int] | None:
    """Tokens of a random answer that the grammar allows; None when it did not come to an end."""
    constraint = chat_constraint(conversation)
    assert constraint is not None
    matcher = VOCABULARY.matcher(compile_constraint(constraint))
    choice = random.Random(seed)
    ids: list[int] = []
    while len(ids) < MAX_TOKENS:
        allowed = np.flatnonzero(VOCABULARY.masks([matcher])[0]).tolist()
        assert allowed, matcher.error
        # Special tokens end texts; without a push, arguments get very long.
        ends = [token for token in allowed if BYTES.is_special(token)]
        token = choice.choice(ends if ends and choice.random() < 0.3 else allowed)
        if token == END:
            return ids
        matcher.advance(token)
        ids.append(token)
    return None


def walks(conversation: Conversation, count: int) -> list[Answer]:
    """What random answers say."""
    found = [walk(conversation, seed) for seed in range(count)]
    ended = [join(read(ids, thinking=conversation.thinking)) for ids in found if ids is not None]
    assert ended
    return ended


def required(*tools: Tool, **more: Any) -> Conversation:
    return Conversation([], tools, tool_choice=ToolChoice.REQUIRED, **more)


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "instruct"])
@pytest.mark.parametrize("name", PARAMETERS)
def test_every_allowed_answer_calls_with_valid_arguments(name: str, thinking: bool) -> None:
    parameters = PARAMETERS[name]
    for answer in walks(required(tool('a"&', parameters), thinking=thinking), 3):
        assert answer.calls
        assert "<|open|>call" not in answer.text
        for call in answer.calls:
            assert call.name == 'a"&'
            jsonschema.validate(json.loads(call.arguments), parameters)


def test_only_the_forced_tool_is_called() -> None:
    conversation = Conversation([], [tool("a"), tool("b"), tool("ab")], forced_tool="b")
    for answer in walks(conversation, 10):
        assert {call.name for call in answer.calls} == {"b"}


def test_all_declared_tools_may_be_called() -> None:
    later = Message(Role.SYSTEM, tools=[tool("c")])
    conversation = Conversation([later], [tool("a"), tool("ab")], tool_choice=ToolChoice.REQUIRED)
    called = {call.name for answer in walks(conversation, 30) for call in answer.calls}
    assert called == {"a", "ab", "c"}


def test_one_call_where_parallel_calls_are_not_allowed() -> None:
    several = walks(required(tool("a")), 20)
    single = walks(required(tool("a"), allows_parallel_calls=False), 20)
    assert max(len(answer.calls) for answer in several) > 1
    assert {len(answer.calls) for answer in single} == {1}


SCHEMA = an_object(("a",), a={"type": "integer"}, b={"enum": ["x", None]})


@pytest.mark.parametrize("schema", [None, SCHEMA, {"type": "array", "items": SCHEMA}, {}])
def test_the_response_is_json_of_the_schema(schema: dict[str, Any] | None) -> None:
    for answer in walks(Conversation([], response_format=ResponseFormat(schema)), 6):
        value = json.loads(answer.text)
        jsonschema.validate(value, {"type": "object"} if schema is None else schema)
        assert not answer.calls


def test_with_tools_the_response_is_json_or_empty_before_calls() -> None:
    conversation = Conversation([], [tool("a")], response_format=ResponseFormat(SCHEMA))
    answers = walks(conversation, 30)
    assert all(answer.calls or answer.text for answer in answers)
    for answer in answers:
        if answer.text:
            jsonschema.validate(json.loads(answer.text), SCHEMA)
    assert any(answer.calls for answer in answers)
    assert any(not answer.calls for answer in answers)


def test_forbidden_tools_are_not_called() -> None:
    conversation = Conversation(
        [], [tool("a")], ToolChoice.NONE, response_format=ResponseFormat(None)
    )
    assert not any(answer.calls for answer in walks(conversation, 20))


@pytest.mark.parametrize("choice", [ToolChoice.AUTO, ToolChoice.NONE])
def test_nothing_is_constrained_without_a_reason(choice: ToolChoice) -> None:
    assert chat_constraint(Conversation([], [tool("a")], choice)) is None


def test_what_the_renderer_writes_is_allowed() -> None:
    """The form that the model learned passes the grammar, token by token."""
    message = Message(
        Role.ASSISTANT,
        ["On it."],
        reasoning="Two calls.",
        tool_calls=[
            call_of('{"city": "Rome <|sep|>", "days": 2, "more": {"x": [1, {"y": null}]}}'),
            call_of('{"city": ""}'),
        ],
    )
    parameters = an_object(("city",), city={"type": "string"}, days={"type": "integer"}, more={})
    constraint = chat_constraint(required(tool("a", parameters)))
    assert constraint is not None
    matcher = VOCABULARY.matcher(compile_constraint(constraint))
    for token in answer_ids(message):
        matcher.advance(token)
    assert matcher.is_complete


def call_of(arguments: str):
    return join(
        read(
            marked(
                '<|open|>tools<|sep|><|open|>call tool="a" index="1"<|sep|>'
                '<|open|>json type="object"<|sep|>'
            )
            + BYTES.encode(arguments)
            + marked("<|close|>json<|sep|><|close|>call<|sep|>")
        )
    ).calls[0]


def test_schemas_that_are_too_deep_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_NESTING):
        schema = {"not": schema}
    for conversation in (
        required(tool("a", schema)),
        Conversation([], response_format=ResponseFormat(schema)),
    ):
        with pytest.raises(InvalidRequestError, match="nested deeper"):
            chat_constraint(conversation)


JUNK: list[Any] = [
    None, True, False, 0, -1, "x", "string", "object", [], ["string"], {}, {"type": "string"},
    {"$ref": "#/$defs/a"}, [{"type": "null"}, {"const": 1}], {"a": {"type": 5}}, float("inf"),
    "\ud800",
]  # fmt: skip
KEYWORDS = [
    "type", "properties", "required", "additionalProperties", "anyOf", "oneOf", "allOf", "not",
    "enum", "const", "$ref", "$defs", "items", "minLength", "maxLength", "pattern", "format",
    "minimum", "patternProperties", "$schema", "if", "x-guidance",
]  # fmt: skip


def junk_schema(choice: random.Random, depth: int = 3) -> Any:
    if depth == 0 or choice.random() < 0.3:
        return choice.choice(JUNK)
    keys = choice.sample(KEYWORDS, choice.randint(0, 4))
    return {key: junk_schema(choice, depth - 1) for key in keys}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "not": {"const": 3}},
        {"type": "string", "format": "no-such-format", "pattern": "("},
        {"type": "array", "uniqueItems": True, "contains": {}},
    ],
)
def test_keywords_that_cannot_be_enforced_refuse_no_tool(schema: dict[str, Any]) -> None:
    for answer in walks(required(tool("a", an_object(("u",), u=schema))), 2):
        assert "u" in json.loads(answer.calls[0].arguments)


@pytest.mark.parametrize("seed", range(100))
def test_any_parameters_give_a_grammar_or_a_clear_refusal(seed: int) -> None:
    choice = random.Random(seed)
    parameters = {"type": "object", "properties": {"p": junk_schema(choice)}}
    if seed % 2:
        parameters = {key: junk_schema(choice) for key in choice.sample(KEYWORDS, 4)}
    try:
        constraint = chat_constraint(required(tool("a", parameters)))
        assert constraint is not None
        VOCABULARY.check(compile_constraint(constraint))
    except InvalidRequestError:
        pass
