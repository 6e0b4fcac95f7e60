"""Running requests as arrays: what the scheduler reads, kept up to date one request at a time.

Rebuilding a thousand views for every step would cost more than planning it. A request is written
again when something of it has changed; a step reads all of them at once, in order of rank.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping

import numpy as np

from actors.engine.block_pool import BlockPool
from actors.engine.preemption import PAUSE_PATIENCE_STEPS
from actors.engine.request import EngineRequest, Rank, RequestKey
from actors.engine.scheduler_state import BoolArray, IntArray, RunningView

(
    _PROMPT,
    _KNOWN,
    _COMPUTED,
    _ROW_LIMIT,
    _SAVED,
    _STEP,
    _PRIORITY,
    _BLOCKS,
    _SLOTS,
    _NUM_COLUMNS,
) = range(10)


class RunningRows:
    """One row per state slot. Owned by the engine thread."""

    def __init__(self, num_slots: int) -> None:
        """Begin without requests."""
        self._ints = np.zeros((_NUM_COLUMNS, num_slots), dtype=np.int64)
        self._can_run = np.zeros(num_slots, dtype=np.bool_)
        self._wants_rows = np.zeros(num_slots, dtype=np.bool_)
        self._order: list[Rank] = []
        """Sorted; ranks are unique. Slots and keys stand in the same places."""
        self._slots: list[int] = []
        self._order_keys: list[RequestKey] = []
        self._ranks: dict[RequestKey, Rank] = {}
        self._slots_N: IntArray | None = None
        self._keys: tuple[RequestKey, ...] = ()

    def add(self, request: EngineRequest) -> None:
        """Take a request that has got its slot."""
        if request.slot is not None:
            rank, key = request.rank, request.key
            index = bisect.bisect_left(self._order, rank)
            self._order.insert(index, rank)
            self._slots.insert(index, request.slot)
            self._order_keys.insert(index, key)
            self._ranks[key] = rank
            self._slots_N = None
            self.update(request)

    def remove(self, key: RequestKey) -> None:
        """Forget a request; nothing happens if it is not here."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            index = bisect.bisect_left(self._order, rank)
            del self._order[index], self._slots[index], self._order_keys[index]
            self._slots_N = None

    def update(self, request: EngineRequest) -> None:
        """Write what has changed of a request. One that has no slot is left alone."""
        slot = request.slot
        if slot is None:
            return
        ints, submit = self._ints, request.submit
        num_prompt = len(submit.token_ids)
        ints[_PROMPT, slot] = num_prompt
        ints[_KNOWN, slot] = num_prompt + len(request.generated)
        ints[_COMPUTED, slot] = request.computed
        ints[_ROW_LIMIT, slot] = request.row_limit
        ints[_SAVED, slot] = request.last_saved
        ints[_STEP, slot] = request.last_step
        ints[_PRIORITY, slot] = submit.priority
        ints[_BLOCKS, slot] = len(request.blocks)
        is_bound = request.leader is not None or request.is_leaving
        ints[_SLOTS, slot] = 0 if is_bound else 1 + len(request.followers)
        self._can_run[slot] = not request.is_paused
        self._wants_rows[slot] = request.wants_rows

    def can_displace(self, priority: int, step: int) -> bool:
        """Whether any request might give way to one of this priority that waits for memory."""
        slots_N = self._sorted_slots()
        can_run = self._can_run[slots_N]
        is_stuck = ~can_run
        if can_run.any():
            is_stuck &= self._ints[_STEP, slots_N] <= step - PAUSE_PATIENCE_STEPS
        return bool((is_stuck | (self._ints[_PRIORITY, slots_N] > priority)).any())

    def count_ahead(self, rank: Rank) -> int:
        """Return how many requests rank before this."""
        return bisect.bisect_left(self._order, rank)

    def _sorted_slots(self) -> IntArray:
        """Slots in order of rank; `_keys` are theirs afterwards."""
        if self._slots_N is None:
            self._slots_N = np.asarray(self._slots, dtype=np.int64)
            self._keys = tuple(self._order_keys)
        return self._slots_N

    def view(
        self,
        requests: Mapping[RequestKey, EngineRequest],
        held: Collection[RequestKey],
        blocks: BlockPool,
        *,
        is_tight: bool,
    ) -> RunningView:
        """Return all requests as they are now.

        Args:
            requests: The running ones.
            held: Of these, nothing is computed.
            blocks: Knows which blocks are private.
            is_tight: Whether somebody may have to be preempted, so that private blocks are counted.
        """
        slots_N, keys = self._sorted_slots(), self._keys
        ints = self._ints[:, slots_N]
        can_run: BoolArray = self._can_run[slots_N]
        if held:
            can_run &= np.asarray([key not in held for key in keys], dtype=np.bool_)
        private = np.zeros(len(keys), dtype=np.int64)
        if is_tight:
            private = np.asarray([_count_private(requests[key], blocks) for key in keys])
        return RunningView(
            keys=keys,
            num_prompt=ints[_PROMPT],
            num_known=ints[_KNOWN],
            computed=ints[_COMPUTED],
            row_limit=ints[_ROW_LIMIT],
            last_saved=ints[_SAVED],
            last_step=ints[_STEP],
            priority=ints[_PRIORITY],
            num_blocks=ints[_BLOCKS],
            num_slots=ints[_SLOTS],
            num_private=private,
            can_run=can_run,
            wants_rows=self._wants_rows[slots_N],
        )


def _count_private(request: EngineRequest, blocks: BlockPool) -> int:
    num_private = blocks.count_private(request.blocks)
    for one in request.followers:
        num_private += blocks.count_private(one.blocks)
    return num_private
