"""Short ways to write down what the scheduler sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engine.request import RequestKey
from actors.engine.scheduler_state import QueuedView, RequestView, RunningView, SchedulerState


@dataclass(frozen=True)
class View:
    """A request, running or queued."""

    key: RequestKey
    prompt: int = 8
    known: int | None = None
    computed: int = 0
    blocks: int = 1
    slots: int = 1
    private: int = 0
    paused: bool = False
    score: bool = False
    credit: int = 1000
    """Of a score."""
    last_step: int = 0
    priority: int = 0
    saved: int = 0

    @property
    def request(self) -> RequestView:
        return RequestView(
            key=self.key,
            num_prompt=self.prompt,
            num_known=self.prompt if self.known is None else self.known,
            computed=self.computed,
            row_limit=self.computed + self.credit if self.score else self.prompt,
            last_saved=self.saved,
            wants_rows=self.score,
        )

    @property
    def queued(self) -> QueuedView:
        return QueuedView(self.request, self.blocks, self.slots, self.priority)


def running_view(views: tuple[View, ...]) -> RunningView:
    requests = [view.request for view in views]
    return RunningView(
        keys=tuple(request.key for request in requests),
        num_prompt=_ints(request.num_prompt for request in requests),
        num_known=_ints(request.num_known for request in requests),
        computed=_ints(request.computed for request in requests),
        row_limit=_ints(request.row_limit for request in requests),
        last_saved=_ints(request.last_saved for request in requests),
        last_step=_ints(view.last_step for view in views),
        priority=_ints(view.priority for view in views),
        num_blocks=_ints(view.blocks for view in views),
        num_slots=_ints(view.slots for view in views),
        num_private=_ints(view.private for view in views),
        can_run=np.array([not view.paused for view in views], dtype=np.bool_),
        wants_rows=np.array([view.score for view in views], dtype=np.bool_),
    )


def state(*running: View, queued: tuple[View, ...] = (), **changes: Any) -> SchedulerState:
    values: dict[str, Any] = {
        "num_available_blocks": 100,
        "num_free_slots": 100,
        "block_tokens": 16,
        "max_step_tokens": 64,
        "max_logit_rows": 64,
        "step": 0,
    }
    return SchedulerState(
        running=running_view(running),
        queued=tuple(view.queued for view in queued),
        **values | changes,
    )


def _ints(values: Any) -> Any:
    return np.array(list(values), dtype=np.int64)
