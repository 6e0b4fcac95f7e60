"""Conversations from the words of the goldens, random answers, and answers read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from model.chat.encode import encode_segments
from model.chat.parser import ChatParser
from model.chat.render import render_answer
from model.chat.values import (
    ChatDelta,
    Conversation,
    Message,
    ReasoningDelta,
    ResponseFormat,
    Role,
    TextDelta,
    ThinkingEffort,
    Tool,
    ToolCall,
    ToolCallDelta,
    ToolChoice,
)
from model.tokenizer import Tokenizer
from model.tokenizer_files import END_OF_MESSAGE, special_id

BYTE_RANKS = {bytes([value]): value for value in range(256)}
NAMES = ("[BOS]", "[EOS]", END_OF_MESSAGE, "<|open|>", "<|close|>", "<|sep|>", "[EOT]", "[PAD]")
OPEN, CLOSE, SEP = (special_id(name) for name in ("<|open|>", "<|close|>", "<|sep|>"))
END = special_id(END_OF_MESSAGE)
BYTES = Tokenizer(BYTE_RANKS, {special_id(name): name for name in NAMES})
"""The byte-level vocabulary: text tokens are bytes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """All parts of an answer, joined."""

    reasoning: str
    text: str
    calls: list[ToolCallDelta]


def join(deltas: Sequence[ChatDelta]) -> Answer:
    return Answer(
        "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)),
        [delta for delta in deltas if isinstance(delta, ToolCallDelta)],
    )


def read(ids: Sequence[int], *, thinking: bool = True) -> list[ChatDelta]:
    """All deltas of an answer."""
    parser = ChatParser(BYTES, thinking=thinking)
    deltas = [delta for token in ids for delta in parser.push(token)]
    return [*deltas, *parser.finish()]


def answer_ids(message: Message, *, thinking: bool = True) -> list[int]:
    """Tokens of an answer as the model should write it."""
    return encode_segments(render_answer(message, thinking=thinking), BYTES)


def marked(text: str) -> list[int]:
    """Tokens of a text in which markers are spelled by name."""
    return BYTES.encode_control(text)


def tool(name: str, parameters: Mapping[str, Any] | None = None) -> Tool:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return Tool({"type": "function", "function": function})


def conversation_of(request: Mapping[str, Any]) -> Conversation:
    """Our conversation for a request in the words of the goldens."""
    wanted = request.get("response_format")
    schema = None if wanted is None else wanted.get("json_schema", {}).get("schema")
    effort = request.get("thinking_effort")
    return Conversation(
        messages=[message_of(entry) for entry in request["messages"]],
        tools=[Tool(entry) for entry in request.get("tools", ())],
        tool_choice=ToolChoice(request.get("tool_choice", "auto")),
        response_format=None if wanted is None else ResponseFormat(schema),
        thinking=request.get("thinking", True),
        effort=None if effort is None else ThinkingEffort(effort),
    )


def message_of(entry: Mapping[str, Any]) -> Message:
    content = entry.get("content")
    parts = [content] if isinstance(content, str) else [p["text"] for p in content or ()]
    return Message(
        role=Role(entry["role"]),
        content=parts,
        name=entry.get("name", ""),
        reasoning=entry.get("reasoning_content", ""),
        tool_calls=[
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in entry.get("tool_calls", ())
        ],
        tool_call_id=entry.get("tool_call_id", ""),
        tools=[Tool(declared) for declared in entry.get("tools", ())],
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
tool_calls = st.builds(
    lambda name, arguments: ToolCall("", name, json.dumps(arguments, ensure_ascii=False)),
    st.text(min_size=1, max_size=8),
    st.dictionaries(st.text(max_size=8), json_values, max_size=3),
)
answers = st.builds(
    Message,
    role=st.just(Role.ASSISTANT),
    content=st.lists(st.text(), max_size=2),
    reasoning=st.text(),
    tool_calls=st.lists(tool_calls, max_size=3),
)
