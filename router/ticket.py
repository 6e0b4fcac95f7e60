"""A dispatch in flight, and where its answers are kept until all are there.

Knows no links: a frame is held with the function that gives its buffer back. Pair answers of one
worker stay where they arrived; those of several are copied into place, still in wire dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from configs.errors import FrameError, ServingError
from configs.ids import WorkerId
from configs.numerics import Combine
from router.combine import PartialSum
from router.dispatch_plan import DispatchPlan, WorkerPart
from router.frames import FrameHeader
from router.pairs import PairOrder
from router.routes import LayerRoutes
from router.settings import RouterSettings
from router.transport.base import Bytes, Frame

Release = Callable[[Frame], None]
_NO_ANSWERS: Bytes = np.empty(0, np.uint8)


Call = tuple[int, int, int, int, int]
"""Generation, step, layer, lane, attempt: equal in a dispatch and its answers."""


class DispatchTicket(Protocol):
    """What the attention side sees of a dispatch in flight."""

    @property
    def layer(self) -> int:
        """Layer whose experts were called."""

    def is_ready(self) -> bool:
        """Whether `finish` would return without waiting."""


class RouterTicket:
    """A dispatch of `LatentRouter`. Owned by the router's thread."""

    def __init__(
        self,
        *,
        call: Call,
        plan: DispatchPlan,
        order: PairOrder,
        routes: LayerRoutes,
        settings: RouterSettings,
        poll: Callable[[], object],
        deadline: float,
        device: torch.device | None,
    ) -> None:
        """Wait for all parts of `plan`.

        Args:
            call: Its name.
            plan: The dispatch.
            order: Canonical order of its pairs; unused when they are summed elsewhere.
            routes: Routes that the plan was made with.
            settings: The router's.
            poll: Takes in what has arrived, without blocking.
            deadline: When the answers must be there.
            device: Where the sum belongs; None for the CPU.
        """
        self.call = call
        self.plan = plan
        self.order = order
        self.routes = routes
        self.deadline = deadline
        self.device = device
        self.error: ServingError | None = None
        self._settings = settings
        self._poll = poll
        self._waiting = {routes.workers[part.worker]: part for part in plan.parts}
        self._held: dict[int, tuple[Frame, Release]] = {}
        self._rows: Bytes | None = None

    @property
    def layer(self) -> int:
        """Layer whose experts were called."""
        return self.call[2]

    @property
    def step(self) -> int:
        """Step that dispatched."""
        return self.call[1]

    @property
    def waiting_for(self) -> list[WorkerId]:
        """Workers whose answer has not come."""
        return list(self._waiting)

    @property
    def is_settled(self) -> bool:
        """Whether all answers are there, or one failed."""
        return not self._waiting or self.error is not None

    def is_ready(self) -> bool:
        """Whether `finish` would return (or raise) without waiting. Takes in what has arrived."""
        if not self.is_settled:
            self._poll()
        return self.is_settled

    def expects(self, worker: WorkerId) -> bool:
        """Whether an answer of this worker is missing."""
        return worker in self._waiting

    def take_answer(self, worker: WorkerId, frame: Frame, release: Release) -> None:
        """Keep a worker's answer.

        Raises:
            FrameError: It does not fit the dispatch; the frame is released.
        """
        part = self._waiting.pop(worker)
        try:
            self._check(worker, part, frame.header)
        except FrameError:
            release(frame)
            raise
        positions = part.positions_Q
        if positions is None or self._settings.combine is Combine.PRESUM:
            self._held[part.worker] = (frame, release)
            return
        row_bytes = self._settings.latent_size * self._settings.wire_dtype.num_bytes
        if self._rows is None:
            self._rows = np.empty((self.plan.num_pairs, row_bytes), np.uint8)
        self._rows[positions] = frame.payload.reshape(-1, row_bytes)
        release(frame)

    def pair_answers(self) -> Bytes:
        """Return the pair answers `[P, L]` as wire bytes, valid until `close`."""
        if self._rows is not None:
            return self._rows.reshape(-1)
        for frame, _ in self._held.values():
            return frame.payload
        return _NO_ANSWERS

    def partial_sums(self) -> list[PartialSum]:
        """Return the partial sums in worker order; valid until `close`."""
        return [PartialSum(part, self._held[part.worker][0].payload) for part in self.plan.parts]

    def close(self) -> None:
        """Release all frames. Idempotent."""
        for frame, release in self._held.values():
            release(frame)
        self._held.clear()
        self._rows = None

    def _check(self, worker: WorkerId, part: WorkerPart, answer: FrameHeader) -> None:
        settings = self._settings
        common = (settings.latent_size, settings.wire_dtype, settings.combine)
        expected = (part.num_rows, part.num_pairs, common)
        found = (
            answer.num_tokens,
            answer.num_pairs,
            (answer.latent_size, answer.wire_dtype, answer.combine),
        )
        if found != expected:
            raise FrameError(
                f"{worker} answered layer {self.layer}, step {self.step} with (tokens, pairs, "
                f"(latent, dtype, combine)) {found}, expected {expected}"
            )
