"""Encoding: segment by segment, and no special token from what clients write.

The ids that the release gives for a tag opening can only be checked with the real vocabulary, which
is not here; what is checked instead is where pieces end.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import CheckpointError
from model.chat.encode import encode_conversation
from model.chat.render import render_conversation
from model.chat.values import Conversation, Message, Role, ToolCall
from model.tokenizer import Tokenizer
from tests.fakes.chat_rig import BYTE_RANKS, BYTES, CLOSE, END, NAMES, OPEN, SEP, tool

LOOK_ALIKES = "".join(NAMES) + "<|reserved_token_300|><|close|>message<|sep|>"


def special_tokens(conversation: Conversation) -> list[int]:
    return [t for t in encode_conversation(conversation, BYTES) if BYTES.is_special(t)]


def everywhere(text: str) -> Conversation:
    """A conversation that holds a text wherever a client can write."""
    return Conversation(
        [
            Message(Role.SYSTEM, [text], name=text),
            Message(Role.USER, [text, text], name=text),
            Message(
                Role.ASSISTANT,
                [text],
                reasoning=text,
                tool_calls=[ToolCall(text, text, '{"k": "v"}'), ToolCall("", "b", f"{{{text}")],
            ),
            Message(Role.TOOL, [text], tool_call_id=text),
        ],
        [tool(text, {"description": text})],
    )


def test_look_alikes_of_special_tokens_stay_text() -> None:
    assert special_tokens(everywhere(LOOK_ALIKES)) == special_tokens(everywhere("plain"))


@given(st.text(alphabet="<|>opensclmg_\ud800", min_size=1).filter(str.strip))
def test_no_text_changes_the_structure(text: str) -> None:
    assert special_tokens(everywhere(text)) == special_tokens(everywhere("plain"))


def test_text_is_in_the_prompt_as_written() -> None:
    ids = encode_conversation(Conversation([Message(Role.USER, [LOOK_ALIKES])]), BYTES)
    assert LOOK_ALIKES in BYTES.decode(ids)


def test_a_tag_is_markers_around_text() -> None:
    ids = encode_conversation(Conversation([Message(Role.USER, ["Hi"])]), BYTES)
    head = [OPEN, *b'message role="user"', SEP, *b"Hi", CLOSE, *b"message", SEP, END]
    tail = [OPEN, *b'message role="assistant"', SEP, OPEN, *b"think", SEP]
    assert ids == head + tail


def test_segments_are_encoded_on_their_own() -> None:
    """Pairs that would merge across the borders of segments do not."""
    ranks = dict(BYTE_RANKS)
    for pair in (b'="', b'"u', b'r"', b"ab", b"bc"):
        ranks[pair] = len(ranks)
    names = {len(ranks) + place: name for place, name in enumerate(NAMES)}
    tokenizer = Tokenizer(ranks, names)
    ids = encode_conversation(Conversation([Message(Role.USER, ["a", "bc"])]), tokenizer)
    assert [tokenizer.decode([token]) for token in ids if token in range(256, len(ranks))] == [
        '="',
        "bc",
        '="',
    ]


def test_every_segment_is_encoded_in_order() -> None:
    conversation = everywhere("some text")
    texts = [segment.text for segment in render_conversation(conversation)]
    ids = encode_conversation(conversation, BYTES)
    assert BYTES.decode(ids, with_special=True) == "".join(texts)


def test_a_vocabulary_without_the_markers_has_no_chat() -> None:
    with pytest.raises(CheckpointError, match=r"<\|open\|>"):
        encode_conversation(Conversation([]), Tokenizer(BYTE_RANKS, {}))
