"""A router whose expert worker runs on the same thread, while the engine waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from actors.expert_worker import ExpertWorker
from model.dispatcher import Ticket
from router.latent_router import LatentRouter, RouterLane


class InlineRouter:
    """Fulfils the engine's `LaneRouter`."""

    def __init__(self, router: LatentRouter, expert: ExpertWorker) -> None:
        """Step `expert` while `router`, which is connected to it alone, waits."""
        self._router = router
        self._expert = expert

    def lane(self, *, step: int, lane: int) -> RouterLane:
        """Return the dispatcher of one lane."""
        return self._router.lane(step=step, lane=lane)

    def wait_any(self, tickets: Sequence[Ticket], *, deadline: float) -> None:
        """Return when a ticket is ready; see `LatentRouter.wait_any`."""
        while not any(ticket.is_ready() for ticket in tickets):
            if not self._expert.step() and time.monotonic() >= deadline:
                self._router.wait_any(tickets, deadline=deadline)

    def abandon_step(self) -> None:
        """Forget every dispatch in flight."""
        self._router.abandon_step()
