"""The order in which waiting frames are served: by layer, oldest first. The clock is passed in."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class MergeQueue(Generic[Item]):
    """Frames waiting for their layer's FFN.

    All frames of a layer that wait are served together. The layer whose first frame came first is
    next, so no layer waits for ever.
    """

    def __init__(self, *, window_s: float) -> None:
        """Make an empty queue.

        Args:
            window_s: How long a layer's first frame waits for others of its layer.
        """
        self._window_s = window_s
        # Layers stand in the order of their first waiting frame: dicts keep insertion order.
        self._waiting: dict[int, list[Item]] = {}
        self._first_at: dict[int, float] = {}

    def __len__(self) -> int:
        """Frames that wait."""
        return sum(len(items) for items in self._waiting.values())

    def push(self, layer: int, item: Item, *, now: float) -> None:
        """Add a frame."""
        items = self._waiting.get(layer)
        if items is None:
            self._waiting[layer] = [item]
            self._first_at[layer] = now
        else:
            items.append(item)

    def next_due(self) -> float | None:
        """When `pop_due` will have something; None while nothing waits."""
        for first_at in self._first_at.values():
            return first_at + self._window_s
        return None

    def pop_due(self, *, now: float) -> list[Item] | None:
        """Take all frames of the next layer, in order of arrival, or None when none is due."""
        for layer, first_at in self._first_at.items():
            if first_at + self._window_s > now:
                return None
            del self._first_at[layer]
            return self._waiting.pop(layer)
        return None
