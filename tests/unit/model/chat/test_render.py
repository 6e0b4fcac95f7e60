"""Rendering against segments of an independent implementation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.errors import InvalidRequestError
from model.chat.render import render_conversation
from model.chat.values import Conversation, Message, Role, Tool, ToolCall, ToolChoice
from tests.fakes.chat_rig import conversation_of, tool

GOLDENS = sorted((Path(__file__).parents[3] / "golden" / "chat").glob("*.json"))
USER = Message(Role.USER, ["Hi"])


def calling(arguments: str) -> Message:
    return Message(Role.ASSISTANT, tool_calls=[ToolCall("x", "a", arguments)])


def spelled(conversation: Conversation) -> str:
    return "".join(segment.text for segment in render_conversation(conversation))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda path: path.stem)
def test_segments_equal_those_of_the_oracle(golden: Path) -> None:
    found = json.loads(golden.read_text())
    segments = render_conversation(conversation_of(found["request"]))
    assert [[part.text, part.is_control] for part in segments] == found["segments"]


def test_there_are_goldens() -> None:
    assert len(GOLDENS) >= 25


def test_a_forced_tool_gives_the_note_that_tools_are_required() -> None:
    forced = Conversation([USER], tools=[tool("a")], forced_tool="a")
    required = Conversation([USER], tools=[tool("a")], tool_choice=ToolChoice.REQUIRED)
    assert render_conversation(forced) == render_conversation(required)


def test_order_of_schema_keys_does_not_change_the_prompt() -> None:
    one = tool("a", {"type": "object", "title": "t"})
    other = tool("a", {"title": "t", "type": "object"})
    assert spelled(Conversation([USER], [one])) == spelled(Conversation([USER], [other]))


@pytest.mark.parametrize("arguments", ["[1]", "3", "null", '"a"', "true"])
def test_arguments_that_are_json_but_no_object_are_refused(arguments: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.tool_calls\[0\]"):
        render_conversation(Conversation([USER, calling(arguments)]))


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_arguments_that_cannot_be_read_stand_as_written(arguments: str) -> None:
    assert arguments in spelled(Conversation([USER, calling(arguments)]))


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([USER, Message(Role.TOOL, ["r"], tool_call_id="lost")], r"messages\[1\]"),
        ([calling("{}"), *[Message(Role.TOOL, ["r"])] * 2], r"messages\[2\]"),
        ([Message(Role.USER, tool_calls=[ToolCall("x", "a", "")])], r"messages\[0\]"),
        ([Message(Role.USER, reasoning="r")], r"messages\[0\]"),
        ([Message(Role.USER, tools=[tool("a")])], r"messages\[0\]"),
        ([Message(Role.SYSTEM, ["text"], tools=[tool("a")])], r"messages\[0\]"),
        ([USER, Message(Role.SYSTEM, tools=[Tool({})])], r"messages\[1\]\.tools\[0\]"),
        ([Message(Role.ASSISTANT, tool_calls=[ToolCall("x", "", "")])], r"tool_calls\[0\]"),
    ],
    ids=[
        "unknown result",
        "result too many",
        "user calls",
        "user thinks",
        "user declares",
        "declares and speaks",
        "broken declaration",
        "unnamed call",
    ],
)
def test_a_message_that_cannot_be_rendered_is_named(messages: list[Message], where: str) -> None:
    with pytest.raises(InvalidRequestError, match=where):
        render_conversation(Conversation(messages))


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation([USER], [Tool({"function": {"name": ""}})]),
        Conversation([USER], [Tool({"function": {"name": "a", "parameters": []}})]),
        Conversation([USER], [tool("a")], forced_tool="b"),
        Conversation([USER], [tool("a")], forced_tool="a", tool_choice=ToolChoice.NONE),
        Conversation([USER], tool_choice=ToolChoice.REQUIRED),
        Conversation([USER], [tool("a", {"x": {1, 2}})]),
    ],
    ids=["no name", "parameters", "unknown tool", "contradiction", "no tool", "no JSON"],
)
def test_contradictions_are_refused(conversation: Conversation) -> None:
    with pytest.raises(InvalidRequestError):
        render_conversation(conversation)
