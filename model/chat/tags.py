"""What the tokens of an answer are: text, tags, and markers that make no tag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from model.chat.markers import CLOSE, OPEN, SEP, MarkerIds
from model.chat.segments import unescape_attribute
from model.tokenizer import Tokenizer

MAX_TAG_BYTES = 16_384
"""A longer name with attributes is no tag: what waits for its end is bounded."""

_HEADER = re.compile(r'([a-z]+)((?: [a-z]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([a-z]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Bytes of ordinary tokens; not necessarily whole characters."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Tag:
    """The opening or closing of an element."""

    is_opening: bool
    name: str
    attributes: Mapping[str, str]
    raw: bytes
    """The tag as written, markers spelled by name."""


@dataclass(frozen=True, slots=True)
class Debris:
    """A special token that is no part of a tag, or a tag that is none, spelled out."""

    raw: bytes
    is_marker: bool
    """False for special tokens that mean nothing in this format; text leaves those out."""


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """The model ended its message."""


TagEvent = TextPiece | Tag | Debris | MessageEnd


class TagReader:
    """Finds tags in a stream of tokens; by special token ids only, never by what text spells."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read tokens of one vocabulary.

        Raises:
            CheckpointError: The vocabulary lacks K3's markers.
        """
        self._tokenizer = tokenizer
        self._ids = MarkerIds.of(tokenizer)
        self._marker: int | None = None
        """The marker of the tag that is being read."""
        self._header = bytearray()

    @property
    def is_inside_tag(self) -> bool:
        """Whether a tag has begun and not ended."""
        return self._marker is not None

    def push(self, token: int) -> list[TagEvent]:
        """Add a token; returns what is certain now."""
        if self._marker is None:
            return [self._outside(token)] if not self._begins_tag(token) else []
        if token == self._ids.sep:
            return [self._end_tag()]
        if self._tokenizer.is_special(token):
            broken = self.finish()
            return broken if self._begins_tag(token) else [*broken, self._outside(token)]
        self._header += self._tokenizer.decode_bytes([token])
        return self.finish() if len(self._header) > MAX_TAG_BYTES else []

    def finish(self) -> list[TagEvent]:
        """Give up on a tag that has not ended."""
        if self._marker is None:
            return []
        raw = self._raw()
        self._marker = None
        self._header.clear()
        return [Debris(raw, is_marker=True)]

    def _begins_tag(self, token: int) -> bool:
        if token not in (self._ids.open, self._ids.close):
            return False
        self._marker = token
        return True

    def _outside(self, token: int) -> TagEvent:
        if not self._tokenizer.is_special(token):
            return TextPiece(self._tokenizer.decode_bytes([token]))
        if token == self._ids.end_of_message:
            return MessageEnd()
        raw = self._tokenizer.decode_bytes([token], with_special=True)
        return Debris(raw, is_marker=token == self._ids.sep)

    def _end_tag(self) -> TagEvent:
        is_opening = self._marker == self._ids.open
        raw = self._raw() + SEP.encode()
        parsed = _parse_header(bytes(self._header))
        self._marker = None
        self._header.clear()
        if parsed is None or (parsed[1] and not is_opening):
            return Debris(raw, is_marker=True)
        return Tag(is_opening, *parsed, raw)

    def _raw(self) -> bytes:
        marker = OPEN if self._marker == self._ids.open else CLOSE
        return marker.encode() + bytes(self._header)


def _parse_header(data: bytes) -> tuple[str, dict[str, str]] | None:
    """Name and attributes, or None for what is no header."""
    try:
        match = _HEADER.fullmatch(data.decode("utf-8"))
    except UnicodeDecodeError:
        return None
    if match is None:
        return None
    pairs = _ATTRIBUTE.findall(match[2])
    attributes = {key: unescape_attribute(value) for key, value in pairs}
    return (match[1], attributes) if len(attributes) == len(pairs) else None
