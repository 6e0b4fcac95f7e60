"""Remembers looked-up keys for a moment, so that requests rarely wait for the store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from cluster.api.access.keys import KeyId, KeyRecord, KeyStore

MAX_ENTRIES: Final = 4096
UNKNOWN_S: Final = 1.0
"""An unknown key may have been made meanwhile."""


class KeyCache:
    """Records of a store, each for `max_age_s`; the least recently used are forgotten first."""

    def __init__(self, store: KeyStore, *, max_age_s: float, clock: Callable[[], float]) -> None:
        """Nothing is read yet.

        Args:
            store: Where records are.
            max_age_s: A revocation takes at most this long.
            clock: Monotonic, seconds.
        """
        self._store = store
        self._max_age_s = max_age_s
        self._clock = clock
        # Apart, so that a flood of unknown keys pushes out no good one.
        self._known: OrderedDict[KeyId, tuple[float, KeyRecord]] = OrderedDict()
        self._unknown: OrderedDict[KeyId, float] = OrderedDict()

    async def find(self, key: KeyId) -> KeyRecord | None:
        """Return a record, or None.

        Raises:
            StateStoreError: It is not remembered and the store cannot be read.
        """
        now = self._clock()
        entry = self._known.get(key)
        if entry is not None and now - entry[0] < self._max_age_s:
            self._known.move_to_end(key)
            return entry[1]
        unknown_since = self._unknown.get(key)
        if unknown_since is not None and now - unknown_since < min(UNKNOWN_S, self._max_age_s):
            return None
        record = await self._store.find(key)
        if record is None:
            self._known.pop(key, None)
            _remember(self._unknown, key, now)
        else:
            self._unknown.pop(key, None)
            # The moment before the look-up: that is how old the answer may be.
            _remember(self._known, key, (now, record))
        return record

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()


_Value = TypeVar("_Value")


def _remember(table: OrderedDict[KeyId, _Value], key: KeyId, value: _Value) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_ENTRIES:
        table.popitem(last=False)
