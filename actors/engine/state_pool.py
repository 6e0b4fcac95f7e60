"""Which request owns which KDA + conv state slot.

The last slots of the memory may be kept aside as scratch: the decoder copies states there that are
to become snapshots, and they are free again when the step ends.

Invariant: every slot is free or owned once; a slot is zero at the moment it is handed out, because
the recurrence reads its start state (a block is never read before it is written, a slot is).
"""

from __future__ import annotations

from configs.errors import InvariantError, OverloadedError
from model.cache import ModelMemory


class StatePool:
    """Hands out state slots of a `ModelMemory`. Owned by one engine thread."""

    def __init__(self, memory: ModelMemory, *, num_scratch: int = 0) -> None:
        """Hand out all slots of `memory` but the last `num_scratch`."""
        self._memory = memory
        self._num_slots = memory.num_slots - num_scratch
        self.scratch = tuple(range(self._num_slots, memory.num_slots))
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._is_used = [False] * self._num_slots

    @property
    def num_slots(self) -> int:
        """Slots in the pool, scratch left out."""
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Slots that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that a request owns."""
        return self._num_slots - len(self._free)

    def allocate(self) -> int:
        """Hand out a zeroed slot.

        Raises:
            OverloadedError: None is free.
        """
        if not self._free:
            raise OverloadedError(
                f"all {self._num_slots} state slots are in use; wait until a running request ends"
            )
        slot = self._free.pop()
        self._is_used[slot] = True
        self._memory.zero_slot(slot)
        return slot

    def free(self, slot: int) -> None:
        """Take a slot back.

        Raises:
            InvariantError: It is unknown or already free.
        """
        if not 0 <= slot < self._num_slots or not self._is_used[slot]:
            raise InvariantError(
                f"state slot {slot} freed but not in use; pool of {self._num_slots} has "
                f"{len(self._free)} free"
            )
        self._is_used[slot] = False
        self._free.append(slot)

    def check(self) -> None:
        """Raise `InvariantError` unless free and used slots add up."""
        num_marked = sum(self._is_used)
        if len(set(self._free)) != len(self._free) or num_marked + len(self._free) != (
            self._num_slots
        ):
            raise InvariantError(
                f"state pool of {self._num_slots}: {num_marked} used, {len(self._free)} free"
            )
