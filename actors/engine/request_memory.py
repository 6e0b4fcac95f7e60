"""What requests have in memory: gives it, lets it grow, copies it, takes it back. Decides nothing.

The only place that allocates, frees, copies and restores. A request starts at the longest of what a
copy of its own and a prefix snapshot hold, or from nothing; wherever it starts, its memory is bit
for bit what it would be if it had computed everything itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from actors.engine.admission import EngineLimits, blocks_needed
from actors.engine.block_pool import BlockPool
from actors.engine.costs import Costs, Progress, Way, decide_preemption
from actors.engine.memory_counters import MemoryCounters
from actors.engine.prefix_index import PrefixIndex, PrefixSnapshot, Tokens
from actors.engine.prompt_sharing import group_need
from actors.engine.request import EngineRequest
from actors.engine.request_snapshot import RequestSnapshot
from actors.engine.scheduler_state import QueuedView, RequestView
from actors.engine.state_pool import StatePool
from configs.errors import InvariantError, SnapshotError
from configs.resolve import SCRATCH_SLOTS
from model.cache import ModelMemory

Clock = Callable[[], float]


def num_scratch(max_snapshot_bytes: int) -> int:
    """Return how many slots beyond those of requests the memory of an engine needs."""
    return SCRATCH_SLOTS if max_snapshot_bytes > 0 else 0


class RequestMemory:
    """Pools, prefix index and copies of one worker. Owned by the engine thread."""

    def __init__(
        self, memory: ModelMemory, limits: EngineLimits, *, model: str, clock: Clock
    ) -> None:
        """Take over `memory`.

        Args:
            memory: As large as `limits` says; slots beyond them are scratch.
            limits: What fits.
            model: Fingerprint that copies carry.
            clock: Monotonic seconds, for the speed of copies.

        Raises:
            InvariantError: Memory and limits disagree.
        """
        if (memory.num_blocks, memory.block_size) != (limits.num_blocks, limits.block_tokens) or (
            memory.num_slots < limits.num_state_slots
        ):
            raise InvariantError(
                f"memory has {memory.num_blocks} blocks of {memory.block_size} and "
                f"{memory.num_slots} slots; the limits state {limits}"
            )
        self.blocks = BlockPool(memory.num_blocks)
        self.slots = StatePool(memory, num_scratch=memory.num_slots - limits.num_state_slots)
        self.prefixes = PrefixIndex(
            self.blocks,
            block_tokens=limits.block_tokens,
            block_bytes=memory.kv_MNPC[:, 0].nbytes,
            max_bytes=limits.snapshots.max_bytes,
        )
        self.costs = Costs()
        self.counters = MemoryCounters()
        self._memory = memory
        self._limits = limits
        self._model = model
        self._clock = clock
        self._are_forms_distinct = limits.snapshots.are_forms_distinct

    @property
    def num_available_blocks(self) -> int:
        """Blocks that a request can get: free ones and cached ones."""
        return self.blocks.num_free + self.blocks.num_cached

    def queued_view(self, request: EngineRequest) -> QueuedView:
        """Return what the admission of a request would take, and where it would start."""
        hit = self._find_hit(request)
        snapshot = request.snapshot
        position, last_saved = 0, 0
        if snapshot is not None:
            position, last_saved = snapshot.position, request.last_saved
        num_own = blocks_needed(request.num_start_tokens, self._limits.block_tokens)
        num_extra = 0
        if hit is not None:
            # Blocks that somebody else uses cost nothing; cached ones are taken from the others.
            shared = hit.blocks[: hit.position // self._limits.block_tokens]
            num_extra = self.blocks.count_cached(shared) - len(shared)
            position = last_saved = hit.position
        need = group_need(
            request.num_prompt, num_own, 1 + len(request.followers), self._limits.block_tokens
        )
        return QueuedView(
            RequestView(
                key=request.key,
                num_prompt=request.num_prompt,
                num_known=request.num_known,
                computed=position,
                row_limit=request.row_limit,
                last_saved=last_saved,
                wants_rows=request.wants_rows,
            ),
            num_blocks=need.num_blocks + num_extra,
            num_slots=need.num_slots,
            priority=request.submit.priority,
        )

    def start(self, request: EngineRequest) -> None:
        """Give a request and its followers their slots and blocks, and what is known of them."""
        hit, snapshot = self._find_hit(request), request.snapshot
        size = self._limits.block_tokens
        shared: tuple[int, ...] = ()
        request.slot = self.slots.allocate()
        if hit is not None:
            shared = hit.blocks[: hit.position // size]
            # In use before anything is evicted for the others.
            self.blocks.share(shared)
            self._memory.write_slot(request.slot, hit.slot)
        num_own = blocks_needed(request.num_start_tokens, size) - len(shared)
        own = self._take(num_own)
        request.blocks = shared + own
        if hit is not None:
            if hit.position % size:
                # Perhaps given up for `own`, perhaps one of these: nobody has written it since.
                self._memory.copy_block(hit.blocks[len(shared)], own[0], hit.position % size)
            self._note_hit(request, hit)
        elif snapshot is not None:
            self._restore(request, snapshot)
        else:
            request.last_saved = 0
        self._drop_copy(request)
        request.hit, request.hit_version = None, -1
        for follower in request.followers:
            self._start_follower(follower, request)

    def grow(self, request: EngineRequest) -> None:
        """Give a request a block for its next token if its last one is full."""
        if request.computed >= len(request.blocks) * self._limits.block_tokens:
            request.blocks += self._take(1)

    def release(self, request: EngineRequest) -> None:
        """Take back everything that a request has."""
        self._drop_copy(request)
        request.hit, request.hit_version = None, -1
        if request.slot is not None:
            self.slots.free(request.slot)
            self.blocks.free(request.blocks)
            request.slot, request.blocks = None, ()

    def preempt(self, request: EngineRequest) -> None:
        """Take back what a request and its followers have, keeping a copy where that is cheaper."""
        progress = self.progress(request)
        way = decide_preemption(progress, self.costs, room_bytes=self.prefixes.room_bytes)
        if request.computed > 0 and way is Way.RESTORE:
            snapshot = self.capture(request)
            self.release(request)
            self._keep_copy(request, snapshot)
        else:
            self.release(request)
        self.counters.count_preemption(way, request.computed)
        request.peak_computed = max(request.peak_computed, request.computed)
        request.computed = 0
        for follower in request.followers:
            self.release(follower)

    def progress(self, request: EngineRequest, *, is_moving: bool = False) -> Progress:
        """Return what a copy of a request would hold, and what computing it again would take.

        Args:
            request: Running.
            is_moving: It would be computed again elsewhere, without the prefixes that are here.
        """
        limit = 0 if is_moving else min(request.computed, request.reuse_limit)
        hit = self.prefixes.match(self._forms(request, limit), limit)
        reused = 0 if hit is None else hit.position
        num_prefilled = min(request.computed, request.num_prompt)
        memory = self._memory
        per_token = memory.kv_MNPC[:, 0, 0].nbytes
        per_slot = memory.state_ASHDD[:, 0].nbytes + memory.conv_ASJ3HD[:, 0].nbytes
        return Progress(
            num_prefilled=max(num_prefilled - reused, 0),
            num_decoded=request.computed - max(num_prefilled, reused),
            num_bytes=per_slot + request.computed * (per_token + 4),
        )

    def capture(self, request: EngineRequest) -> RequestSnapshot:
        """Return a copy of everything that a request has in memory.

        Raises:
            InvariantError: It has nothing.
        """
        if request.slot is None or request.computed == 0:
            raise InvariantError(f"request {request.key} has nothing in memory to copy")
        begun = self._clock()
        snapshot = RequestSnapshot(
            model=self._model,
            num_prompt=request.num_prompt,
            token_ids_T=np.asarray(request.tokens(0, request.computed), dtype=np.int32),
            slot=self._memory.read_slot(request.slot),
            tokens_MTC=self._memory.read_tokens(request.blocks, request.computed),
        )
        self._measure_copy(snapshot.num_bytes, self._clock() - begun)
        return snapshot

    def attach(self, request: EngineRequest, snapshot: RequestSnapshot) -> None:
        """Let a queued request come back from a copy that was made elsewhere.

        Raises:
            SnapshotError: It is of something else, or the snapshot budget has no room for it.
        """
        self._check_snapshot(request, snapshot)
        if snapshot.num_bytes > self.prefixes.room_bytes:
            raise SnapshotError(
                f"snapshot for request {request.key.request_id} has {snapshot.num_bytes:,} bytes; "
                f"{self.prefixes.room_bytes:,} of the snapshot budget are left"
            )
        self._keep_copy(request, snapshot)

    def _check_snapshot(self, request: EngineRequest, snapshot: RequestSnapshot) -> None:
        """Raise `SnapshotError` unless a request can go on from a snapshot."""
        position, num_prompt = snapshot.position, request.num_prompt
        where = f"snapshot for request {request.key.request_id}"
        if snapshot.model != self._model:
            raise SnapshotError(f"{where} is of model {snapshot.model!r}, not {self._model!r}")
        if not 0 < position <= min(request.reuse_limit, request.num_known - 1):
            raise SnapshotError(
                f"{where} holds {position} tokens; it can use 1 to {request.reuse_limit}"
            )
        is_same_form = snapshot.num_prompt == num_prompt or (
            position <= min(snapshot.num_prompt, num_prompt)
        )
        if not is_same_form or snapshot.token_ids_T.tolist() != request.tokens(0, position):
            raise SnapshotError(f"{where} is of other tokens")
        memory = self._memory
        expected = (
            tuple(memory.state_ASHDD[:, 0].shape),
            tuple(memory.conv_ASJ3HD[:, 0].shape),
            (memory.kv_MNPC.shape[0], position, memory.kv_MNPC.shape[3]),
        )
        slot = snapshot.slot
        found = tuple(
            tuple(tensor.shape) for tensor in (slot.state_AHDD, slot.conv_AJC, snapshot.tokens_MTC)
        )
        if found != expected:
            raise SnapshotError(f"{where} has shapes {found}, expected {expected}")

    def save_prefix(self, request: EngineRequest, position: int, slot: int) -> None:
        """Leave a prefix snapshot of a running request.

        Args:
            request: Its blocks hold at least `position` tokens.
            position: After the token that `slot` is the state of.
            slot: Its own slot, or scratch.
        """
        if not self.prefixes.is_enabled or position <= 0:
            return
        begun = self._clock()
        copy = self._memory.read_slot(slot)
        self._measure_copy(copy.num_bytes, self._clock() - begun)
        blocks = request.blocks[: blocks_needed(position, self._limits.block_tokens)]
        self.prefixes.insert(self._forms(request, position), blocks, copy)
        request.last_saved = position

    def save_end(self, request: EngineRequest) -> None:
        """Leave a prefix snapshot of a request that ends, unless nobody could go on from it.

        Where forms are distinct no prompt goes on from an answer.
        """
        if request.slot is None or request.computed <= max(request.last_saved, request.num_prompt):
            return
        if not self._are_forms_distinct:
            gain = request.computed - request.last_saved
            if gain >= self._limits.snapshots.min_gain_tokens:
                self.save_prefix(request, request.computed, request.slot)

    def check(self) -> None:
        """Raise `InvariantError` unless blocks and slots add up."""
        self.blocks.check()
        self.slots.check()

    def _forms(self, request: EngineRequest, num_tokens: int) -> Tokens:
        return request.forms(num_tokens, are_forms_distinct=self._are_forms_distinct)

    def _find_hit(self, request: EngineRequest) -> PrefixSnapshot | None:
        """Return the prefix snapshot that it would go on from, unless its own copy holds more."""
        index = self.prefixes
        if request.hit_version != index.version:
            limit = request.reuse_limit
            request.hit = index.match(self._forms(request, limit), limit)
            request.hit_version = index.version
        hit, snapshot = request.hit, request.snapshot
        if hit is None or (snapshot is not None and snapshot.position >= hit.position):
            return None
        return hit

    def _note_hit(self, request: EngineRequest, hit: PrefixSnapshot) -> None:
        self.prefixes.touch(hit)
        request.computed = request.last_saved = hit.position
        self.counters.num_hits += 1
        self.counters.num_hit_tokens += hit.position
        if request.admitted_at is None:
            request.num_shared = min(hit.position, request.num_prompt)

    def _restore(self, request: EngineRequest, snapshot: RequestSnapshot) -> None:
        if request.slot is None:
            raise InvariantError(f"request {request.key} is restored without a slot")
        begun = self._clock()
        self._memory.write_slot(request.slot, snapshot.slot)
        self._memory.write_tokens(request.blocks, snapshot.tokens_MTC)
        self._measure_copy(snapshot.num_bytes, self._clock() - begun)
        request.computed = snapshot.position
        self.counters.num_restores += 1

    def _start_follower(self, follower: EngineRequest, leader: EngineRequest) -> None:
        size = self._limits.block_tokens
        shared = leader.blocks[: leader.num_prompt // size]
        self.blocks.share(shared)
        num_own = blocks_needed(follower.num_start_tokens, size) - len(shared)
        follower.blocks = shared + self._take(num_own)
        follower.slot = self.slots.allocate()

    def _take(self, num_blocks: int) -> tuple[int, ...]:
        """Allocate blocks, giving up prefix snapshots for them."""
        self.prefixes.evict_for_blocks(num_blocks)
        return self.blocks.allocate(num_blocks)

    def _keep_copy(self, request: EngineRequest, snapshot: RequestSnapshot) -> None:
        self.prefixes.evict_for_bytes(snapshot.num_bytes)
        self.prefixes.reserved_bytes += snapshot.num_bytes
        request.snapshot = snapshot

    def _drop_copy(self, request: EngineRequest) -> None:
        if request.snapshot is not None:
            self.prefixes.reserved_bytes -= request.snapshot.num_bytes
            request.snapshot = None

    def _measure_copy(self, num_bytes: int, seconds: float) -> None:
        if seconds > 0:
            self.costs = self.costs.measured(copy_bytes_per_s=num_bytes / seconds)
