"""Segments: the pieces of a rendered conversation, each of which is encoded on its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from model.chat.markers import CLOSE, OPEN, SEP
from model.tokenizer_files import END_OF_MESSAGE


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a prompt. Never empty.

    Merging two adjacent text segments changes the ids, because byte pairs never cross a border.
    """

    text: str
    is_control: bool = False
    """A control segment is one marker and becomes one special token; text never does."""


END_SEGMENT = Segment(END_OF_MESSAGE, is_control=True)
_OPEN = Segment(OPEN, is_control=True)
_CLOSE = Segment(CLOSE, is_control=True)
_SEP = Segment(SEP, is_control=True)


def text_segments(*texts: str) -> list[Segment]:
    """One segment per text that is not empty."""
    return [Segment(text) for text in texts if text]


def opening(tag: str, attributes: Iterable[tuple[str, str]] = ()) -> list[Segment]:
    """Segments that open an element: four text segments per attribute."""
    segments = [_OPEN, Segment(tag)]
    for key, value in attributes:
        segments += text_segments(f" {key}", '="', escape_attribute(value), '"')
    segments.append(_SEP)
    return segments


def closing(tag: str) -> list[Segment]:
    """Segments that close an element."""
    return [_CLOSE, Segment(tag), _SEP]


def escape_attribute(value: str) -> str:
    """Write `&` and `"` as entities; nothing else is escaped in an attribute."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape_attribute(value: str) -> str:
    """Undo `escape_attribute`; other entities stay as they are."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
