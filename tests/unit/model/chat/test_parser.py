"""Reading answers: round trips, malformed calls, and any tokens at all."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.chat.call_reader import MAX_CALL_BYTES
from model.chat.parser import ChatParser
from model.chat.tags import MAX_TAG_BYTES
from model.chat.values import Message, ReasoningDelta, Role, TextDelta, ToolCall, ToolCallDelta
from model.tokenizer import Tokenizer
from tests.fakes.chat_rig import (
    BYTE_RANKS,
    BYTES,
    CLOSE,
    END,
    NAMES,
    OPEN,
    SEP,
    Answer,
    answer_ids,
    answers,
    join,
    marked,
    read,
)

STRAY = 300
"""A special token without a meaning."""
CALL = '<|open|>call tool="a" index="1"<|sep|>'
CLOSED = "<|close|>call<|sep|>"


def argument(value: str, *, kind: str = "string", key: str = "k") -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def in_tools(text: str) -> list[int]:
    """Tokens of an answer without thinking whose tools section holds a text."""
    return marked(
        f"Hi<|close|>response<|sep|><|open|>tools<|sep|>{text}<|close|>tools<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
    )


@given(answers, st.booleans())
def test_what_was_rendered_is_read_back(message: Message, thinking: bool) -> None:
    found = join(read(answer_ids(message, thinking=thinking), thinking=thinking))
    thought = message.reasoning if thinking and message.reasoning.strip() else ""
    assert found.reasoning == thought
    assert found.text == "".join(message.content)
    assert [(call.name, call.arguments) for call in found.calls] == [
        (call.name, call.arguments) for call in message.tool_calls
    ]
    assert [call.index for call in found.calls] == list(range(len(found.calls)))


@given(st.lists(st.integers(-2, 520) | st.sampled_from([OPEN, CLOSE, SEP, END, STRAY])))
def test_any_tokens_are_accepted(ids: list[int]) -> None:
    for thinking in (True, False):
        read(ids, thinking=thinking)


FRAGMENTS = [
    b"think", b"response", b"tools", b"call", b'call tool="a" index="1"', b"argument", b"json",
    b'argument key="k" type="number"', b'argument key="k" type="string"', b'json type="object"',
    b"message", b"1", b"{}", b"\xc3", b"\xa9",
]  # fmt: skip


@given(
    st.lists(st.sampled_from([[OPEN], [CLOSE], [SEP], [END], [STRAY], *map(list, FRAGMENTS)])),
    st.booleans(),
)
def test_any_order_of_fragments_is_accepted_and_calls_are_json(
    parts: list[list[int]], thinking: bool
) -> None:
    for call in join(read([*chain.from_iterable(parts)], thinking=thinking)).calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(st.lists(st.sampled_from([OPEN, CLOSE, SEP, STRAY, *b"0123", 0xC3, 0xA9, 0xF0])))
def test_nothing_is_lost_where_no_tag_is_valid(ids: list[int]) -> None:
    """Digits name no element, so all of it is text, markers spelled out."""
    kept = [token for token in ids if token != STRAY]
    expected = BYTES.decode(kept, with_special=True)
    assert join(read(ids)) == Answer(expected, "", [])
    assert join(read(ids, thinking=False)) == Answer("", expected, [])


@given(st.binary(), st.booleans())
def test_text_is_what_the_tokenizer_decodes(data: bytes, thinking: bool) -> None:
    found = join(read(list(data), thinking=thinking))
    assert found.reasoning + found.text == BYTES.decode(list(data))


@given(st.text())
def test_a_delta_never_holds_half_a_character(text: str) -> None:
    deltas = read(BYTES.encode(text), thinking=False)
    assert all(isinstance(delta, TextDelta) and delta.text in text for delta in deltas)
    assert join(deltas).text == text


def test_text_comes_with_its_token() -> None:
    parser = ChatParser(BYTES, thinking=True)
    assert [parser.push(token) for token in b"ab"] == [[ReasoningDelta("a")], [ReasoningDelta("b")]]


def test_a_call_comes_whole_when_it_is_closed() -> None:
    message = Message(Role.ASSISTANT, tool_calls=[ToolCall("", "a", '{"k": 1}')] * 2)
    deltas = read(answer_ids(message))
    assert deltas == [ToolCallDelta(0, "a", '{"k": 1}'), ToolCallDelta(1, "a", '{"k": 1}')]


def test_text_that_spells_markers_is_text() -> None:
    text = "<|close|>think<|sep|><|end_of_msg|>"
    assert join(read(BYTES.encode(text))) == Answer(text, "", [])


def test_the_stop_token_may_be_missing() -> None:
    ids = answer_ids(Message(Role.ASSISTANT, ["Hi"], reasoning="r"))
    assert ids[-1] == END
    assert join(read(ids)) == join(read(ids[:-1])) == Answer("r", "Hi", [])


def test_special_tokens_without_a_meaning_are_left_out() -> None:
    assert join(read([*b"a", STRAY, *b"b"])) == Answer("ab", "", [])


def test_an_unfinished_character_does_not_join_what_follows_a_tag() -> None:
    ids = [0xC3, *marked("<|close|>think<|sep|><|open|>response<|sep|>"), 0xA9]
    assert join(read(ids)) == Answer("\ufffd", "\ufffd", [])


def test_attributes_are_unescaped() -> None:
    call = '<|open|>call tool="a&quot;&amp;quot;&lt;" index="1"<|sep|>'
    found = join(read(in_tools(call + CLOSED), thinking=False))
    assert found.calls == [ToolCallDelta(0, 'a"&quot;&lt;', "{}")]


def test_numbers_keep_their_digits() -> None:
    call = CALL + argument(" 1.50e3 ", kind="number") + CLOSED
    assert join(read(in_tools(call), thinking=False)).calls[0].arguments == '{"k": 1.50e3}'


def test_a_json_block_is_a_call() -> None:
    call = f'{CALL}<|open|>json type="object"<|sep|>{{"a":1}}<|close|>json<|sep|>{CLOSED}'
    assert join(read(in_tools(call), thinking=False)).calls == [ToolCallDelta(0, "a", '{"a":1}')]


def test_text_between_channels_is_visible() -> None:
    ids = marked("r<|close|>think<|sep|>x<|open|>response<|sep|>y<|close|>response<|sep|>z")
    assert join(read(ids)) == Answer("r", "xyz", [])


def test_a_channel_that_was_not_closed_ends_where_the_next_begins() -> None:
    ids = marked(f"r<|open|>response<|sep|>y<|open|>tools<|sep|>{CALL}{CLOSED}")
    assert join(read(ids)) == Answer("r", "y", [ToolCallDelta(0, "a", "{}")])


MALFORMED = {
    "bad number": CALL + argument("x", kind="number") + CLOSED,
    "NaN": CALL + argument("NaN", kind="number") + CLOSED,
    "boolean as number": CALL + argument("true", kind="number") + CLOSED,
    "object as array": CALL + argument("{}", kind="array") + CLOSED,
    "deep array": CALL + argument("[" * 5000, kind="array") + CLOSED,
    "endless number": CALL + argument("9" * 5000, kind="number") + CLOSED,
    "unknown type": CALL + argument("1", kind="integer") + CLOSED,
    "repeated key": CALL + argument("1") + argument("2") + CLOSED,
    "no tool": '<|open|>call index="1"<|sep|>' + CLOSED,
    "no index": '<|open|>call tool="a"<|sep|>' + CLOSED,
    "index zero": '<|open|>call tool="a" index="0"<|sep|>' + CLOSED,
    "more attributes": '<|open|>call tool="a" index="1" x="y"<|sep|>' + CLOSED,
    "no key": f'{CALL}<|open|>argument type="string"<|sep|>v<|close|>argument<|sep|>{CLOSED}',
    "unknown element": f"{CALL}<|open|>thing<|sep|>v<|close|>thing<|sep|>{CLOSED}",
    "text outside": f"{CALL}text{CLOSED}",
    "stray token": f"{CALL}{argument('a[EOT]b')}{CLOSED}",
    "marker in a value": f"{CALL}{argument('a<|sep|>b')}{CLOSED}",
    "block that is no object": f'{CALL}<|open|>json type="object"<|sep|>[]<|close|>json<|sep|>'
    + CLOSED,
    "block and argument": f'{CALL}{argument("v")}<|open|>json type="object"<|sep|>{{}}<|close|>json'
    f"<|sep|>{CLOSED}",
    "open argument": f'{CALL}<|open|>argument key="k" type="string"<|sep|>v{CLOSED}',
    "never closed": CALL + argument("v"),
}


@pytest.mark.parametrize("call", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_call_is_visible_text(call: str) -> None:
    assert join(read(in_tools(call), thinking=False)) == Answer("", "Hi" + call, [])


def test_a_malformed_call_takes_no_index_and_spoils_no_other() -> None:
    good = CALL + argument("v") + CLOSED
    found = join(read(in_tools(good + MALFORMED["bad number"] + good), thinking=False))
    assert [call.index for call in found.calls] == [0, 1]
    assert found.text == "Hi" + MALFORMED["bad number"]


@pytest.mark.parametrize("cut", range(len(marked(CALL + argument("v") + CLOSED))))
def test_a_cut_call_is_visible_text(cut: int) -> None:
    before = marked("Hi<|close|>response<|sep|><|open|>tools<|sep|>")
    part = marked(CALL + argument("v") + CLOSED)[:cut]
    found = join(read([*before, *part], thinking=False))
    assert found == Answer("", "Hi" + BYTES.decode(part, with_special=True), [])


def test_what_waits_for_a_tag_to_end_is_bounded() -> None:
    parser = ChatParser(BYTES, thinking=False)
    parser.push(OPEN)
    held = [parser.push(ord("a")) for _ in range(MAX_TAG_BYTES + 1)]
    assert [len(deltas) for deltas in held] == [0] * MAX_TAG_BYTES + [1]


def test_what_waits_for_a_call_to_end_is_bounded() -> None:
    """One token of this vocabulary is long, so that few reach the limit."""
    piece = b"v" * (MAX_CALL_BYTES // 8)
    ranks = {**BYTE_RANKS, piece: len(BYTE_RANKS)}
    tokenizer = Tokenizer(ranks, {257 + place: name for place, name in enumerate(NAMES)})
    parser = ChatParser(tokenizer, thinking=False)
    opened = f'<|open|>tools<|sep|>{CALL}<|open|>argument key="k" type="string"<|sep|>'
    for token in tokenizer.encode_control(opened):
        assert parser.push(token) == []
    held = [parser.push(256) for _ in range(9)]
    assert [len(deltas) for deltas in held] == [0] * 7 + [1, 1]
    assert join(list(chain.from_iterable(held))).text.count("v") == 9 * len(piece)
