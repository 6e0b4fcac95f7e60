"""Runs the lanes of a step: several decoder generators in flight on one thread.

A lane is suspended where its latents are with the experts. All lanes are started before any is
resumed; then the lane that has waited longest among those whose answers are here goes on. Only when
no answer is here does the thread wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from configs.errors import ServingError
from model.batch import StepBatch
from model.cache import ModelMemory
from model.dispatcher import Dispatcher, Ticket

Clock = Callable[[], float]


class StepModel(Protocol):
    """The decoder as the engine sees it."""

    def run(
        self, batch: StepBatch, memory: ModelMemory, dispatcher: Dispatcher
    ) -> Generator[Ticket, None, Tensor]:
        """Compute a batch; yield a ticket per MoE layer, return float32 logits `[R, vocab]`."""


class LaneRouter(Protocol):
    """The router as the engine sees it. Owned by the engine thread."""

    def lane(self, *, step: int, lane: int) -> Dispatcher:
        """Dispatcher of one lane of one step."""

    def wait_any(self, tickets: Sequence[Ticket], *, deadline: float) -> None:
        """Return when a ticket is ready, or has failed; raise `TransportTimeoutError` if none."""

    def abandon_step(self) -> None:
        """Forget every dispatch in flight; late answers are dropped."""


@dataclass(frozen=True, slots=True)
class LaneResult:
    """How a lane ended: with logits or with an error."""

    lane: int
    logits_RV: Tensor | None
    error: ServingError | None


class _Lane:
    """One suspended generator and the ticket it waits for."""

    def __init__(self, lane: int, generator: Generator[Ticket, None, Tensor]) -> None:
        self.lane = lane
        self.ticket: Ticket | None = None
        self.wait_until = 0.0
        self._generator = generator

    def advance(self) -> LaneResult | None:
        """Run until the next ticket (None) or the end (its result)."""
        try:
            self.ticket = next(self._generator)
        except StopIteration as done:
            return LaneResult(self.lane, done.value, None)
        except ServingError as exc:
            return LaneResult(self.lane, None, exc)
        return None

    def close(self) -> None:
        """End the generator where it is suspended. Idempotent."""
        self._generator.close()

    @property
    def is_ready(self) -> bool:
        return self.ticket is not None and self.ticket.is_ready()


def run_lanes(
    generators: Sequence[Generator[Ticket, None, Tensor]],
    router: LaneRouter,
    *,
    clock: Clock,
    wait_timeout_s: float,
) -> Generator[LaneResult, None, None]:
    """Drive all generators to their ends; yield a result as each ends.

    A lane that fails does not touch the others. Closing the iterator early closes the lanes.

    Args:
        generators: One per lane, not started.
        router: Waits for answers.
        clock: Monotonic seconds.
        wait_timeout_s: Longest wait of a lane for one ticket.
    """
    lanes = [_Lane(index, generator) for index, generator in enumerate(generators)]
    waiting: list[_Lane] = []
    try:
        for lane in lanes:
            yield from _resume(lane, None, waiting, clock() + wait_timeout_s)
        while waiting:
            lane, error = _next_lane(waiting, router)
            waiting.remove(lane)
            yield from _resume(lane, error, waiting, clock() + wait_timeout_s)
    finally:
        for lane in lanes:
            lane.close()


def _resume(
    lane: _Lane, error: ServingError | None, waiting: list[_Lane], wait_until: float
) -> Generator[LaneResult, None, None]:
    """Run a lane on, or end it with `error`; put it last among the waiting unless it has ended."""
    result = lane.advance() if error is None else LaneResult(lane.lane, None, error)
    if result is None:
        lane.wait_until = wait_until
        waiting.append(lane)
        return
    lane.close()
    yield result


def _next_lane(waiting: list[_Lane], router: LaneRouter) -> tuple[_Lane, ServingError | None]:
    """Return the lane to resume next, and the error that ends it instead, if any.

    `waiting` is ordered by the time of suspension, so its head has the nearest deadline.
    """
    while True:
        for lane in waiting:
            if lane.is_ready:
                return lane, None
        head = waiting[0]
        tickets = [lane.ticket for lane in waiting if lane.ticket is not None]
        try:
            router.wait_any(tickets, deadline=head.wait_until)
        except ServingError as exc:
            ready = [lane for lane in waiting if lane.is_ready]
            return (ready[0], None) if ready else (head, exc)
