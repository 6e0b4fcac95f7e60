"""What the scheduler knows: frozen values.

Running requests are many and change with every token, so they are arrays, one entry per request in
order of rank (`actors/engine/running_rows.py` keeps them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.engine.request import RequestKey
from actors.request_channel import ROW_GRID

TILE_TOKENS = ROW_GRID
"""The grid of absolute positions on which chunks of prompts end."""

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class RequestView(NamedTuple):
    """What prefill planning knows of a request."""

    key: RequestKey
    num_prompt: int
    num_known: int
    """Prompt and generated tokens."""
    computed: int
    """Tokens in memory, or that will be when it is admitted."""
    row_limit: int
    """Prompt positions that may be computed: those that a score has credit for, else all."""
    last_saved: int
    """Position of the last prefix snapshot on its way; 0 for none."""
    wants_rows: bool
    """Whether rows of its prompt need logits."""

    @property
    def num_left(self) -> int:
        """Tokens to compute before it decodes."""
        return max(self.num_prompt, self.num_known - 1) - self.computed


class QueuedView(NamedTuple):
    """A request that could be admitted."""

    request: RequestView
    num_blocks: int
    """Free or cached blocks that its admission takes, its followers' included."""
    num_slots: int
    """Its own and its followers'."""
    priority: int
    num_ahead: int = 0
    """Running requests that rank before it."""


@dataclass(frozen=True, slots=True, eq=False)
class RunningView:
    """Running requests in order of rank, one entry of each array per request. Read only."""

    keys: tuple[RequestKey, ...]
    num_prompt: IntArray
    num_known: IntArray
    computed: IntArray
    row_limit: IntArray
    last_saved: IntArray
    last_step: IntArray
    """Step that computed something of it last, or admitted it."""
    priority: IntArray
    num_blocks: IntArray
    """Blocks that it owns."""
    num_slots: IntArray
    """Slots that its preemption sets free: its followers' too; 0 where it cannot be preempted."""
    num_private: IntArray
    """Blocks that its preemption sets free."""
    can_run: BoolArray
    """It has credit, its gateway reads, and it waits for no other request."""
    wants_rows: BoolArray

    def __len__(self) -> int:
        """Requests."""
        return len(self.keys)

    def request(self, index: int) -> RequestView:
        """One of them."""
        return RequestView(
            self.keys[index],
            int(self.num_prompt[index]),
            int(self.num_known[index]),
            int(self.computed[index]),
            int(self.row_limit[index]),
            int(self.last_saved[index]),
            bool(self.wants_rows[index]),
        )


@dataclass(frozen=True, slots=True)
class SnapshotRule:
    """When prefill leaves a prefix snapshot."""

    interval_tokens: int
    """At every multiple; a multiple of `TILE_TOKENS`."""
    min_gain_tokens: int
    """Not nearer to the last one."""
    num_scratch: int
    """Snapshots per step that lie within a chunk, not at its end."""


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything a plan depends on."""

    running: RunningView
    queued: tuple[QueuedView, ...]
    """Head of the queue, by rank; need not hold more than could be admitted."""
    num_available_blocks: int
    """Free ones and cached ones."""
    num_free_slots: int
    block_tokens: int
    max_step_tokens: int
    max_logit_rows: int
    """Rows of `LogitsWanted.ALL` in one step; at least `TILE_TOKENS`."""
    step: int
    starved_steps: int = 0
    """Steps in a row whose plan said `is_prefill_starved`."""
    may_displace: bool = True
    """Whether any running request might give way to the head of the queue."""
    snapshots: SnapshotRule | None = None
    """None leaves none."""
