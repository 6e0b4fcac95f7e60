"""What one engine step computes. Pure: a frozen state in, a frozen plan out.

Order of a step: admit from the queue (first come, first served, by memory), then one decode token
of every request that can decode, then prefill chunks with what is left of `max_step_tokens`.

Memory: a request is admitted with all the blocks it can ever need, so a running request never waits
for memory and nothing deadlocks. The head of the queue is never overtaken, so nothing starves.

Prefill chunks end on the `TILE_TOKENS` grid of absolute positions, or at the prompt's end: the
chunked recurrence is anchored there, so that a prompt gives the same bits however it is split.

A score computes no row beyond its credit: it pauses at the last grid position that its credit
reaches, keeps its memory, and holds up nobody.

Tokens that an earlier attempt generated are replayed in decode form, in the prefill lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from actors.engine.request import RequestKey
from actors.request_channel import ROW_GRID

TILE_TOKENS = ROW_GRID
PREFILL_PATIENCE_STEPS = 8
"""After so many steps in which decode left prefill nothing, one tile is kept for prefill."""


class LogitsWanted(Enum):
    """Which rows of a chunk need logits."""

    NONE = 0
    LAST = 1
    """The last one, to sample a token."""
    ALL = 2
    """Every row of a score, or of a prompt whose log-probabilities are wanted."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What the scheduler knows of a request."""

    key: RequestKey
    num_prompt: int
    num_known: int
    """Prompt and generated tokens."""
    computed: int
    """Tokens in memory."""
    num_blocks: int
    """Blocks to reserve at admission, those of its followers included."""
    is_paused: bool
    """Computes nothing at present: no credit, or its gateway does not read."""
    row_credit: int | None
    """Rows that a score may still compute; None if it is no score."""
    last_step: int
    num_slots: int = 1
    """Slots to reserve at admission: its own and its followers'."""
    wants_prompt_logprobs: bool = False

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether every row of the prompt needs logits."""
        return self.row_credit is not None or self.wants_prompt_logprobs

    @property
    def can_decode(self) -> bool:
        """Whether only the last token, a generated one, is missing in memory."""
        return (
            not self.is_paused
            and self.num_known > self.num_prompt
            and (self.computed == self.num_known - 1)
        )

    @property
    def can_prefill(self) -> bool:
        """Whether prompt or replayed tokens are missing in memory, and credit reaches some."""
        if self.is_paused:
            return False
        if self.row_credit is not None:
            return prefill_end(self, self.row_credit) > self.computed
        return self.computed < self.num_prompt or self.computed < self.num_known - 1


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything a plan depends on."""

    running: tuple[RequestView, ...]
    """In order of admission."""
    queued: tuple[RequestView, ...]
    """Head of the queue, in order of arrival; need not hold more than `num_free_slots`."""
    num_free_blocks: int
    num_free_slots: int
    max_step_tokens: int
    max_logit_rows: int
    """Rows of `LogitsWanted.ALL` in one step; at least `TILE_TOKENS`."""
    starved_steps: int = 0
    """Steps in a row whose plan said `is_prefill_starved`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request to compute."""

    key: RequestKey
    position: int
    num_tokens: int
    is_decode: bool
    """Decode form: for generated tokens, however many."""
    logits: LogitsWanted

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
class StepPlan:
    """One step."""

    admitted: tuple[RequestKey, ...]
    decode: tuple[Chunk, ...]
    """The decode lane: one token each."""
    prefill: tuple[Chunk, ...]
    """The prefill lane."""
    is_prefill_starved: bool
    """Prefill had work, and decode left it no room."""


def schedule(state: SchedulerState) -> StepPlan:
    """Plan a step. Always computes something if any request is able to."""
    admitted = plan_admission(
        state.queued, num_free_blocks=state.num_free_blocks, num_free_slots=state.num_free_slots
    )
    behind = [view for view in (*state.running, *admitted) if view.can_prefill]
    is_patient = state.starved_steps < PREFILL_PATIENCE_STEPS
    reserved = 0 if is_patient or not behind else TILE_TOKENS
    decode = _plan_decode(state, budget=state.max_step_tokens - reserved)
    prefill = _plan_prefill(
        behind, budget=state.max_step_tokens - len(decode), max_logit_rows=state.max_logit_rows
    )
    return StepPlan(
        admitted=tuple(view.key for view in admitted),
        decode=decode,
        prefill=prefill,
        is_prefill_starved=bool(behind) and not prefill,
    )


def prefill_end(view: RequestView, room: int) -> int:
    """Return where the next `room` prompt tokens may end: on the grid, or at the prompt's end."""
    end = min(view.computed + room, view.num_prompt)
    return end if end == view.num_prompt else end - end % TILE_TOKENS


def plan_admission(
    queued: Sequence[RequestView], *, num_free_blocks: int, num_free_slots: int
) -> tuple[RequestView, ...]:
    """Return the longest head of the queue that fits the free memory."""
    num_admitted = 0
    for view in queued:
        if view.num_blocks > num_free_blocks or view.num_slots > num_free_slots:
            break
        num_free_blocks -= view.num_blocks
        num_free_slots -= view.num_slots
        num_admitted += 1
    return tuple(queued[:num_admitted])


def _plan_decode(state: SchedulerState, *, budget: int) -> tuple[Chunk, ...]:
    ready = [view for view in state.running if view.can_decode]
    if len(ready) > budget:
        # Least recently computed first: with more requests than room they take turns.
        ready = sorted(ready, key=lambda view: view.last_step)[:budget]
    return tuple(
        Chunk(view.key, view.computed, 1, is_decode=True, logits=LogitsWanted.LAST)
        for view in ready
    )


def _plan_prefill(
    behind: Sequence[RequestView], *, budget: int, max_logit_rows: int
) -> tuple[Chunk, ...]:
    chunks: list[Chunk] = []
    for view in behind:
        room = budget
        if view.wants_prompt_logits and view.computed < view.num_prompt:
            room = min(budget, max_logit_rows)
        if view.row_credit is not None:
            room = min(room, view.row_credit)
        chunk = _plan_chunk(view, room)
        if chunk is None:
            if room < budget:
                continue  # One that waits for rows must not hold up prompts behind it.
            break
        chunks.append(chunk)
        budget -= chunk.num_tokens
        if chunk.logits is LogitsWanted.ALL:
            max_logit_rows -= chunk.num_tokens
    return tuple(chunks)


def _plan_chunk(view: RequestView, room: int) -> Chunk | None:
    """Return the next chunk of at most `room` tokens, or None if no whole tile fits."""
    position = view.computed
    if position >= view.num_prompt:
        num_tokens = min(room, view.num_known - 1 - position)
        if num_tokens <= 0:
            return None
        return Chunk(view.key, position, num_tokens, is_decode=True, logits=LogitsWanted.NONE)
    end = prefill_end(view, room)
    if end <= position:
        return None
    logits = LogitsWanted.NONE
    if view.wants_prompt_logits:
        logits = LogitsWanted.ALL
    elif end == view.num_prompt == view.num_known:
        logits = LogitsWanted.LAST
    return Chunk(view.key, position, end - position, is_decode=False, logits=logits)
