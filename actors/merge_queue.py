"""The order in which waiting frames are served: by kind, oldest first. The clock is passed in.

The kind of a frame says which others it can be computed with: same layer, same wire dtype.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Kind = TypeVar("Kind", bound=Hashable)
Item = TypeVar("Item")


class MergeQueue(Generic[Kind, Item]):
    """Frames waiting for the FFN of their kind.

    All frames of a kind that wait are served together. The kind whose first frame came first is
    next, so none waits for ever.
    """

    def __init__(self, *, window_s: float) -> None:
        """Make an empty queue.

        Args:
            window_s: How long the first frame of a kind waits for others.
        """
        self._window_s = window_s
        # Kinds stand in the order of their first waiting frame: dicts keep insertion order.
        self._waiting: dict[Kind, list[Item]] = {}
        self._first_at: dict[Kind, float] = {}

    def __len__(self) -> int:
        """Frames that wait."""
        return sum(len(items) for items in self._waiting.values())

    def push(self, kind: Kind, item: Item, *, now: float) -> None:
        """Add a frame."""
        items = self._waiting.get(kind)
        if items is None:
            self._waiting[kind] = [item]
            self._first_at[kind] = now
        else:
            items.append(item)

    def next_due(self) -> float | None:
        """When `pop_due` will have something; None while nothing waits."""
        for first_at in self._first_at.values():
            return first_at + self._window_s
        return None

    def pop_due(self, *, now: float) -> list[Item] | None:
        """Take all frames of the next kind, in order of arrival, or None when none is due."""
        for kind, first_at in self._first_at.items():
            if first_at + self._window_s > now:
                return None
            del self._first_at[kind]
            return self._waiting.pop(kind)
        return None
