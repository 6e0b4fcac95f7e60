"""One tool call of an answer, from its opening tag to its closing one."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from model.chat.tags import Debris, Tag, TextPiece
from model.chat.values import ToolCallDelta

MAX_CALL_BYTES = 4 * 1024 * 1024
"""A longer call is returned as text: what waits for its end is bounded."""

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}
_INDEX = re.compile(r"[1-9][0-9]{0,8}")


class CallReader:
    """Collects a call; knows at its end whether it is well formed, and what it said if not."""

    def __init__(self, tag: Tag) -> None:
        """Begin with the opening tag of the call."""
        self._raw = bytearray(tag.raw)
        self._name = tag.attributes.get("tool", "")
        self._is_valid = (
            set(tag.attributes) == {"tool", "index"}
            and bool(self._name)
            and _INDEX.fullmatch(tag.attributes["index"]) is not None
        )
        self._element: Tag | None = None
        """The argument or JSON block that is open."""
        self._body = bytearray()
        self._arguments: dict[str, str] = {}
        """JSON text by key."""
        self._block: str | None = None

    @property
    def raw(self) -> bytes:
        """The call so far as the model wrote it, markers spelled by name."""
        return bytes(self._raw)

    @property
    def is_too_long(self) -> bool:
        """Whether the call has passed `MAX_CALL_BYTES`."""
        return len(self._raw) > MAX_CALL_BYTES

    def push(self, event: TextPiece | Debris | Tag) -> None:
        """Add what stands inside the call."""
        if isinstance(event, TextPiece):
            self._raw += event.data
            if self._element is None:
                self._is_valid = False
            else:
                self._body += event.data
            return
        self._raw += event.raw
        if isinstance(event, Debris):
            self._is_valid = False
        elif event.is_opening:
            self._open(event)
        else:
            self._close(event)

    def finish(self, tag: Tag, *, index: int) -> ToolCallDelta | None:
        """End with the closing tag of the call; None means that it is malformed."""
        self._raw += tag.raw
        if not self._is_valid or self._element is not None:
            return None
        if self._block is not None:
            return ToolCallDelta(index, self._name, self._block)
        members = (f"{_quote(key)}: {value}" for key, value in self._arguments.items())
        return ToolCallDelta(index, self._name, "{" + ", ".join(members) + "}")

    def _open(self, tag: Tag) -> None:
        if self._element is not None or self._block is not None:
            self._is_valid = False
            return
        self._element = tag
        self._body.clear()
        attributes = tag.attributes
        if tag.name == "argument":
            self._is_valid &= set(attributes) == {"key", "type"}
            self._is_valid &= attributes.get("key", "") not in self._arguments
        elif tag.name == "json":
            self._is_valid &= attributes == {"type": "object"} and not self._arguments
        else:
            self._is_valid = False

    def _close(self, tag: Tag) -> None:
        element, self._element = self._element, None
        if element is None or element.name != tag.name or not self._is_valid:
            self._is_valid = False
            return
        value = _json_text(bytes(self._body), element.attributes["type"])
        if value is None:
            self._is_valid = False
        elif element.name == "json":
            self._block = value
        else:
            self._arguments[element.attributes["key"]] = value


def _json_text(data: bytes, type_name: str) -> str | None:
    """JSON text of a value, or None when the text is no value of its type.

    Numbers and whatever nests keep the characters that the model wrote.
    """
    if type_name == "string":
        return _quote(data.decode("utf-8", errors="replace"))
    expected = _JSON_TYPES.get(type_name)
    if expected is None:
        return None
    try:
        text = data.decode("utf-8").strip()
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) and type_name != "boolean":
        return None
    return text if isinstance(value, expected) else None


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    """NaN and infinities are no JSON, whatever Python reads."""
    raise ValueError(name)
