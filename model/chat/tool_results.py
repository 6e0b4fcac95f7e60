"""Tool results in the order of the calls that they answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from configs.errors import InvalidRequestError
from model.chat.values import Message, Role, ToolCall


@dataclass(frozen=True, slots=True)
class PlacedMessage:
    """A message at its place in the prompt."""

    message: Message
    index: int
    """Where the client sent it; errors name this place."""
    tool: str = ""
    """Which tool answers, for a tool's message."""
    result_index: int = 0
    """1-based place among the results since the last assistant message."""


def place_messages(messages: Sequence[Message]) -> Iterator[PlacedMessage]:
    """Yield all messages; each run of tool results is sorted into the order of the calls.

    A run in which one id matches no call of the last assistant message keeps its order, and names
    come from the messages or, failing that, from the call at the same place.

    Raises:
        InvalidRequestError: A result answers no known tool. Names the message.
    """
    calls: Sequence[ToolCall] = ()
    num_results = 0
    numbered = enumerate(messages)
    for is_result, run in groupby(numbered, key=lambda item: item[1].role is Role.TOOL):
        if is_result:
            for index, message, tool in _sorted_results(list(run), calls):
                num_results += 1
                name = tool or message.name or _name_at(num_results, calls)
                if not name:
                    raise InvalidRequestError(
                        f"messages[{index}] answers no known tool: tool_call_id "
                        f"{message.tool_call_id!r} is no call of the assistant message before it; "
                        "send that message with its calls, or name the tool"
                    )
                yield PlacedMessage(message, index, name, num_results)
            continue
        for index, message in run:
            if message.role is Role.ASSISTANT:
                calls, num_results = message.tool_calls, 0
            yield PlacedMessage(message, index)


def _sorted_results(
    run: Sequence[tuple[int, Message]], calls: Sequence[ToolCall]
) -> list[tuple[int, Message, str]]:
    """Index, message and tool of results; the tool is "" where ids do not tell."""
    places: dict[str, int] = {}
    for place, call in enumerate(calls):
        if call.id:
            places.setdefault(call.id, place)
    if any(message.tool_call_id not in places for _, message in run):
        return [(index, message, "") for index, message in run]
    ordered = sorted(run, key=lambda item: places[item[1].tool_call_id])
    return [
        (index, message, calls[places[message.tool_call_id]].name) for index, message in ordered
    ]


def _name_at(result_index: int, calls: Sequence[ToolCall]) -> str:
    return calls[result_index - 1].name if result_index <= len(calls) else ""
