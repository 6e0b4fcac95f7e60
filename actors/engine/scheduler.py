"""What one engine step computes. Pure: a frozen state in, a frozen plan out.

Rank: requests are served in the order of their arrival, moved by their priority
(`request_channel.PRIORITY_WAIT_S`); as the rank of a request never changes, none waits for ever.

Order of a step: make room for the requests that decode, admit from the queue by memory, then one
decode token of every request that can decode, then prefill chunks with what is left of
`max_step_tokens`.

Memory: a request is admitted when all its known tokens and one more fit, with a block to spare for
each running request; then it grows block by block as it decodes. When no block is left, the last
in rank are preempted and queue again at their rank; the first in rank never is, and fits alone
(else it was refused), so it ends, and then the next one does. Requests that have computed nothing
for long, because nobody reads their answers, give way first. The head of the queue is never
overtaken.

Prefill: the first in rank gets at least half of the room, the rest goes to the prompts with the
least left to compute, so that neither long nor short prompts hold up the others.

Chunks end on the `TILE_TOKENS` grid of absolute positions, or at the prompt's end: the chunked
recurrence is anchored there, so that a prompt gives the same bits however it is split. A score
computes no row beyond its credit: it pauses at the last grid position that its credit reaches.
Tokens of an answer that are not in memory are replayed in decode form, in the prefill lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, overload

import numpy as np

from actors.engine.preemption import plan_displacement, plan_growth
from actors.engine.request import RequestKey
from actors.engine.scheduler_state import (
    TILE_TOKENS,
    BoolArray,
    IntArray,
    QueuedView,
    RequestView,
    RunningView,
    SchedulerState,
)

PREFILL_PATIENCE_STEPS = 8
"""After so many steps in which decode left prefill nothing, one tile is kept for prefill."""
MAX_REPLAY_TOKENS = TILE_TOKENS
"""Of one request in one step: each is a decode step that the whole lane waits for."""


class LogitsWanted(Enum):
    """Which rows of a chunk need logits."""

    NONE = 0
    LAST = 1
    """The last one, to sample a token."""
    ALL = 2
    """Every row of a score, or of a prompt whose log-probabilities are wanted."""


class Chunk(NamedTuple):
    """Consecutive tokens of one request to compute."""

    key: RequestKey
    position: int
    num_tokens: int
    is_decode: bool
    """Decode form: for generated tokens, however many."""
    logits: LogitsWanted
    save_at: int | None = None
    """Position in (position, end] at which a prefix snapshot is left."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.position + self.num_tokens

    @property
    def num_logit_rows(self) -> int:
        """Rows whose logits are wanted."""
        match self.logits:
            case LogitsWanted.NONE:
                return 0
            case LogitsWanted.LAST:
                return 1
            case LogitsWanted.ALL:
                return self.num_tokens


@dataclass(frozen=True, slots=True)
class DecodeLane(Sequence[Chunk]):
    """One token each of many requests. Its chunks are made anew whenever they are looked at."""

    keys: tuple[RequestKey, ...] = ()
    positions: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Requests."""
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        """One of them, or some."""
        if isinstance(index, slice):
            return DecodeLane(self.keys[index], self.positions[index])
        return Chunk(
            self.keys[index], self.positions[index], 1, is_decode=True, logits=LogitsWanted.LAST
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step."""

    preempted: tuple[RequestKey, ...]
    """Give up their memory before anything else."""
    admitted: tuple[RequestKey, ...]
    decode: DecodeLane
    prefill: tuple[Chunk, ...]
    """The prefill lane."""
    is_prefill_starved: bool
    """Prefill had work, and decode left it no room."""


def schedule(state: SchedulerState) -> StepPlan:
    """Plan a step. Computes something, or preempts, if any request is able to run."""
    running = state.running
    decodable = running.can_run & (running.num_known > running.num_prompt)
    decodable &= running.computed == running.num_known - 1
    behind = _find_behind(running)
    has_prefill = bool(behind.any())
    is_patient = state.starved_steps < PREFILL_PATIENCE_STEPS
    reserved = 0 if is_patient or not has_prefill else TILE_TOKENS
    chosen = _choose_decode(running, decodable, budget=state.max_step_tokens - reserved)
    growth = plan_growth(
        running, chosen, num_available=state.num_available_blocks, block_tokens=state.block_tokens
    )
    preempted = growth.preempted
    admitted: tuple[QueuedView, ...] = ()
    if not preempted:
        admitted = plan_admission(
            state.queued,
            num_available_blocks=state.num_available_blocks - growth.num_blocks,
            num_free_slots=state.num_free_slots,
            num_running=len(running),
        )
        if not admitted and state.queued and state.may_displace:
            preempted = plan_displacement(state)
    if preempted:
        keep = ~np.isin(np.arange(len(running)), preempted)
        chosen, behind = growth.decode[keep[growth.decode]], behind & keep
    else:
        chosen = growth.decode
    views = [running.request(index) for index in np.flatnonzero(behind).tolist()]
    views += [queued.request for queued in admitted if _can_prefill(queued.request)]
    decode = _decode_lane(running, chosen)
    prefill = _plan_prefill(views, state, budget=state.max_step_tokens - len(decode))
    return StepPlan(
        preempted=tuple(running.keys[index] for index in preempted),
        admitted=tuple(queued.request.key for queued in admitted),
        decode=decode,
        prefill=prefill,
        is_prefill_starved=bool(views) and not prefill,
    )


def plan_admission(
    queued: Sequence[QueuedView],
    *,
    num_available_blocks: int,
    num_free_slots: int,
    num_running: int,
) -> tuple[QueuedView, ...]:
    """Return the longest head of the queue that fits, a block for each running request left over.

    Without the spare blocks a request would be preempted as soon as the others grow.
    """
    num_admitted = 0
    for view in queued:
        spare = num_running + num_admitted
        if view.num_blocks + spare > num_available_blocks or view.num_slots > num_free_slots:
            break
        num_available_blocks -= view.num_blocks
        num_free_slots -= view.num_slots
        num_admitted += 1
    return tuple(queued[:num_admitted])


def prefill_end(view: RequestView, room: int) -> int:
    """Return where the next `room` prompt tokens may end: on the grid, or at the prompt's end."""
    end = min(view.computed + room, view.num_prompt, view.row_limit)
    return end if end == view.num_prompt else end - end % TILE_TOKENS


def _find_behind(running: RunningView) -> BoolArray:
    """Which requests can compute tokens in the prefill lane."""
    limit = np.minimum(running.row_limit, running.num_prompt)
    reach = np.where(limit == running.num_prompt, limit, limit - limit % TILE_TOKENS)
    is_replaying = (running.computed >= running.num_prompt) & (
        running.computed < running.num_known - 1
    )
    found: BoolArray = running.can_run & ((reach > running.computed) | is_replaying)
    return found


def _can_prefill(view: RequestView) -> bool:
    if view.computed >= view.num_prompt:
        return view.computed < view.num_known - 1
    return prefill_end(view, view.num_prompt) > view.computed


def _choose_decode(running: RunningView, decodable: BoolArray, *, budget: int) -> IntArray:
    """Return at most `budget` of those that can decode, in order of rank."""
    ready = np.flatnonzero(decodable)
    if len(ready) <= budget:
        return ready
    # Least recently computed first: with more requests than room they take turns.
    turns = np.argsort(running.last_step[ready], kind="stable")[: max(budget, 0)]
    return np.sort(ready[turns])


def _decode_lane(running: RunningView, chosen: IntArray) -> DecodeLane:
    keys = running.keys
    if len(chosen) < len(keys):
        keys = tuple(map(keys.__getitem__, chosen.tolist()))
    return DecodeLane(keys, tuple(running.computed[chosen].tolist()))


class _Room:
    """What is left of a step for prefill."""

    def __init__(self, state: SchedulerState, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_rows = state.max_logit_rows
        self.rule = state.snapshots
        self.num_scratch = 0 if state.snapshots is None else state.snapshots.num_scratch

    def take(self, chunk: Chunk) -> None:
        self.num_tokens -= chunk.num_tokens
        if chunk.logits is LogitsWanted.ALL:
            self.num_rows -= chunk.num_tokens
        if chunk.save_at is not None and chunk.save_at < chunk.end:
            self.num_scratch -= 1


def _plan_prefill(
    views: Sequence[RequestView], state: SchedulerState, *, budget: int
) -> tuple[Chunk, ...]:
    if not views:
        return ()
    first, *others = views
    share = min(first.num_left, max(TILE_TOKENS, budget // 2))
    room = _Room(state, budget - share)
    chunks: list[Chunk] = []
    for view in sorted(others, key=lambda view: view.num_left):
        if room.num_tokens <= 0:
            break
        chunk = _plan_chunk(view, room)
        if chunk is not None:
            chunks.append(chunk)
            room.take(chunk)
    room.num_tokens += share
    head = _plan_chunk(first, room)
    return tuple(chunks) if head is None else (head, *chunks)


def _plan_chunk(view: RequestView, room: _Room) -> Chunk | None:
    """Return the next chunk that fits, or None if no whole tile does."""
    position = view.computed
    if position >= view.num_prompt:
        num_tokens = min(room.num_tokens, view.num_known - 1 - position, MAX_REPLAY_TOKENS)
        if num_tokens <= 0:
            return None
        return Chunk(view.key, position, num_tokens, is_decode=True, logits=LogitsWanted.NONE)
    num_tokens = min(room.num_tokens, room.num_rows) if view.wants_rows else room.num_tokens
    end = prefill_end(view, num_tokens)
    if end <= position:
        return None
    logits = LogitsWanted.NONE
    if view.wants_rows:
        logits = LogitsWanted.ALL
    elif end == view.num_prompt == view.num_known:
        logits = LogitsWanted.LAST
    save_at = _plan_save(view, end, room)
    return Chunk(
        view.key, position, end - position, is_decode=False, logits=logits, save_at=save_at
    )


def _plan_save(view: RequestView, end: int, room: _Room) -> int | None:
    """Return where a chunk that ends at `end` leaves a prefix snapshot.

    At the last grid position from which the same prompt has a token left to compute, or at a
    multiple of the interval.
    """
    rule = room.rule
    if rule is None:
        return None
    last = (view.num_prompt - 1) - (view.num_prompt - 1) % TILE_TOKENS
    save_at = last if view.computed < last <= end else end - end % rule.interval_tokens
    if save_at <= view.computed or save_at - view.last_saved < rule.min_gain_tokens:
        return None
    return None if save_at < end and room.num_scratch <= 0 else save_at
