"""From the tokens of an answer to reasoning, text and tool calls, token by token."""

from __future__ import annotations

import codecs
from enum import Enum, auto

from model.chat.call_reader import CallReader
from model.chat.tags import Debris, MessageEnd, Tag, TagEvent, TagReader, TextPiece
from model.chat.values import ChatDelta, ReasoningDelta, TextDelta
from model.tokenizer import Tokenizer


class _Place(Enum):
    """Where in an answer the reader is."""

    REASONING = auto()
    RESPONSE = auto()
    TOOLS = auto()
    BETWEEN = auto()
    """Outside of every channel: before the response, after it, or after the message."""


_MOVES: dict[tuple[bool, str], tuple[frozenset[_Place], _Place]] = {
    (False, "think"): (frozenset({_Place.REASONING}), _Place.BETWEEN),
    (True, "response"): (frozenset({_Place.REASONING, _Place.BETWEEN}), _Place.RESPONSE),
    (False, "response"): (frozenset({_Place.RESPONSE}), _Place.BETWEEN),
    (True, "tools"): (frozenset({*_Place} - {_Place.TOOLS}), _Place.TOOLS),
    (False, "tools"): (frozenset({_Place.TOOLS}), _Place.BETWEEN),
    (False, "message"): (frozenset(_Place), _Place.BETWEEN),
}
"""By opening and name: from which places a tag leads, and where to. A channel that the model forgot
to close ends where the next one opens."""


class ChatParser:
    """Reads one answer; feed it every token after the generation prefix, in order.

    Any sequence of tokens is accepted. Text of a channel is what `Tokenizer.decode` gives for its
    tokens, so special tokens without a meaning here are left out; nothing else is ever lost: tags
    that make no sense, text between channels, and calls that are malformed or cut are visible text,
    their markers spelled by name. A delta never holds half a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, thinking: bool) -> None:
        """Start after the generation prefix of a conversation with the same `thinking`.

        Raises:
            CheckpointError: The tokenizer lacks K3's markers.
        """
        self._reader = TagReader(tokenizer)
        self._place = _Place.REASONING if thinking else _Place.RESPONSE
        self._call: CallReader | None = None
        self._num_calls = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> list[ChatDelta]:
        """Add one token and return what is certain now; often nothing."""
        return self._read(self._reader.push(token))

    def finish(self) -> list[ChatDelta]:
        """Return what was held back: a half character, an unfinished tag or call."""
        return [*self._read(self._reader.finish()), *self._drop_call(), *self._end_run()]

    def _read(self, events: list[TagEvent]) -> list[ChatDelta]:
        deltas: list[ChatDelta] = []
        for event in events:
            deltas += self._event(event)
        return deltas

    def _event(self, event: TagEvent) -> list[ChatDelta]:
        match event:
            case MessageEnd():
                return [*self._drop_call(), *self._end_run()]
            case Tag():
                return self._tag(event)
            case TextPiece() | Debris():
                if self._call is not None:
                    return self._inside_call(self._call, event)
                if isinstance(event, TextPiece):
                    return self._text(event.data)
                return self._text(event.raw) if event.is_marker else []

    def _tag(self, tag: Tag) -> list[ChatDelta]:
        key = (tag.is_opening, tag.name)
        if key == (True, "call") and self._place is _Place.TOOLS:
            ended = [*self._drop_call(), *self._end_run()]
            self._call = CallReader(tag)
            return ended
        if self._call is not None:
            if key == (False, "call"):
                return self._end_call(self._call, tag)
            if key not in _MOVES:
                return self._inside_call(self._call, tag)
        sources, target = _MOVES.get(key, (frozenset(), self._place))
        if self._place not in sources or tag.attributes:
            return [*self._drop_call(), *self._text(tag.raw)]
        ended = [*self._drop_call(), *self._end_run()]
        self._place = target
        return ended

    def _inside_call(self, call: CallReader, event: TextPiece | Debris | Tag) -> list[ChatDelta]:
        call.push(event)
        return self._drop_call() if call.is_too_long else []

    def _end_call(self, call: CallReader, tag: Tag) -> list[ChatDelta]:
        found = call.finish(tag, index=self._num_calls)
        if found is None:
            return self._drop_call()
        self._call = None
        self._num_calls += 1
        ended: list[ChatDelta] = self._end_run()
        return [*ended, found]

    def _drop_call(self) -> list[ChatDelta]:
        """Return an unfinished or malformed call as text."""
        call, self._call = self._call, None
        return [] if call is None else self._text(call.raw)

    def _text(self, data: bytes) -> list[ChatDelta]:
        return self._delta(self._decoder.decode(data))

    def _end_run(self) -> list[ChatDelta]:
        """End a run of text at structure: an unfinished character never joins what follows."""
        deltas = self._delta(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return deltas

    def _delta(self, text: str) -> list[ChatDelta]:
        if not text:
            return []
        if self._place is _Place.REASONING:
            return [ReasoningDelta(text)]
        return [TextDelta(text)]
