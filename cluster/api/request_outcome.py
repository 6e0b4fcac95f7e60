"""How an accepted request ended, as its reader is told, and why a worker no longer runs one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from actors.request_channel import Ended, Usage
from cluster.api.status import error_of_code
from configs.errors import (
    DeadlineError,
    InvariantError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    ServingError,
    ShuttingDownError,
    WorkerError,
)
from configs.ids import RequestId, WorkerId
from configs.numerics import EndReason, FinishReason


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    reason: EndReason
    usage: Usage
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    """Set unless `reason` is FINISHED."""


class LeaveReason(StrEnum):
    """Why a worker no longer runs a request that has not ended; a label of metrics."""

    DRAIN = "drain"
    """It drains and gave the request up."""
    LOST = "lost"
    """It stops, or its connection ended."""
    REFUSED = "refused"
    """It has no place for it, and never began."""


@dataclass(frozen=True, slots=True)
class Departure:
    """A request leaves its worker."""

    worker: WorkerId
    reason: LeaveReason
    error: ServingError
    """What the request ends with where no other worker takes it."""
    usage: Usage
    """Of the attempt, as far as it is known."""


def leaving(request_id: RequestId, *, is_late: bool) -> tuple[EndReason, ServingError]:
    """Return how a request ends whose reader leaves.

    Args:
        request_id: Of the request.
        is_late: The client's deadline has passed, which is why.
    """
    if is_late:
        return EndReason.DEADLINE, DeadlineError(f"request {request_id}: its deadline passed")
    return EndReason.CANCELLED, RequestCancelledError(f"request {request_id}: the client left")


def departure_of(ended: Ended, worker: WorkerId, *, first_attempt: int) -> Departure | None:
    """Return why a request leaves its worker with this end of an attempt; None where it is the end.

    A worker that drains has begun nothing that it refuses, so the request goes elsewhere, and so do
    those that fail because their worker stops. One that is full answers so to its client, unless
    the request was moved there.
    """
    name = ended.request_id
    if ended.reason is EndReason.MOVED:
        error: ServingError = WorkerError(
            f"request {name}: attention worker {worker} drains and gave it up; retry"
        )
        return Departure(worker, LeaveReason.DRAIN, error, ended.usage)
    if ended.reason not in (EndReason.REJECTED, EndReason.FAILED):
        return None
    error = error_of_code(ended.error_code, ended.error_message)
    if ended.reason is EndReason.FAILED:
        is_stopping = isinstance(error, ShuttingDownError)
        return Departure(worker, LeaveReason.LOST, error, ended.usage) if is_stopping else None
    is_closing = isinstance(error, NoWorkerError | ShuttingDownError)
    is_full = isinstance(error, OverloadedError) and ended.attempt > first_attempt
    if not (is_closing or is_full):
        return None
    return Departure(worker, LeaveReason.REFUSED, error, ended.usage)


def outcome_of(ended: Ended) -> Outcome:
    """Return what a worker's end of an attempt means for the request."""
    name, text = ended.request_id, ended.error_message
    error: ServingError | None
    match ended.reason:
        case EndReason.FINISHED:
            error = None
        case EndReason.CANCELLED:
            error = RequestCancelledError(text if text else f"request {name} was cancelled")
        case EndReason.DEADLINE:
            cost = f"{ended.usage.total_s:.3f} s and {ended.usage.output_tokens} tokens"
            late = f"request {name}: its deadline passed after {cost}"
            error = DeadlineError(text if text else late)
        case EndReason.REJECTED | EndReason.FAILED:
            error = error_of_code(ended.error_code, text)
        case EndReason.MOVED:
            raise InvariantError(f"request {name}: MOVED ends an attempt, never the request")
    return Outcome(ended.reason, ended.usage, ended.finish_reason, error)
