"""Finds stop texts in a growing answer and says what of it may be shown.

Aho and Corasick, "Efficient string matching" (1975): one state for all stop texts, whose depth is
the length of the longest end of the text that may still become one of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    depth: int
    next: dict[str, _Node] = field(default_factory=dict)
    fail: _Node | None = None
    """Where the longest proper end of this node's text is a node; None at the root."""
    match: str = ""
    """Longest stop text that the node's text ends with; "" for none."""


class StopTexts:
    """The stop texts of a request, prepared once for all of its answers. Immutable."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Prepare `texts`, none of them empty."""
        self.root = _build(texts)


class StopScanner:
    """Takes text in pieces and gives back what cannot be part of a stop text any more.

    The first stop text to be complete ends the answer, of several the longest; the answer is cut
    where it begins. Where the pieces begin and end makes no difference. At most the longest stop
    text less one character is held back.
    """

    def __init__(self, texts: StopTexts, *, is_included: bool = False) -> None:
        """Look for `texts`; `is_included` keeps the one that ends the answer."""
        self._root = texts.root
        self._state = self._root
        self._held = ""
        self._is_included = is_included
        self.matched: str | None = None
        """The stop text that ended the answer; None while it goes on."""

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(self._held)

    def push(self, text: str, *, can_stop: bool = True) -> str:
        """Add text and return what may be shown; nothing any more after a match.

        Args:
            text: More of the answer.
            can_stop: False ignores stop texts that are complete in this piece.
        """
        if self.matched is not None:
            return ""
        state = self._state
        for index, char in enumerate(text):
            state = self._step(state, char)
            if state.match and can_stop:
                return self._stop(self._held + text[: index + 1], state.match)
        self._state = state
        whole = self._held + text
        num_held = _longest_unfinished(state)
        self._held = whole[len(whole) - num_held :]
        return whole[: len(whole) - num_held]

    def flush(self) -> str:
        """Return what is held back: nothing follows it."""
        text, self._held = self._held, ""
        self._state = self._root
        return text

    def _stop(self, whole: str, match: str) -> str:
        self.matched = match
        self._held = ""
        return whole if self._is_included else whole[: len(whole) - len(match)]

    def _step(self, state: _Node, char: str) -> _Node:
        while char not in state.next:
            if state.fail is None:
                return state
            state = state.fail
        return state.next[char]


def _build(texts: Iterable[str]) -> _Node:
    root = _Node(0)
    for text in texts:
        node = root
        for char in text:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.match = text
    pending = deque([root])
    while pending:
        node = pending.popleft()
        for char, child in node.next.items():
            child.fail = _fallback(node, char, root)
            if not child.match:
                child.match = child.fail.match
            pending.append(child)
    return root


def _fallback(node: _Node, char: str, root: _Node) -> _Node:
    fail = node.fail
    while fail is not None:
        if char in fail.next:
            return fail.next[char]
        fail = fail.fail
    return root


def _longest_unfinished(state: _Node) -> int:
    """Length of the longest end of the text that more characters can make a stop text of."""
    node: _Node | None = state
    while node is not None and not node.next:
        node = node.fail
    return 0 if node is None else node.depth
