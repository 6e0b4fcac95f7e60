import pytest

from actors.request_channel import Ended, Usage
from cluster.api.request_outcome import LeaveReason, departure_of, outcome_of
from configs.errors import InvariantError, OverloadedError
from configs.ids import RequestId, WorkerId
from configs.numerics import EndReason

A = WorkerId("a")


def ended(reason, code="", attempt=1):
    return Ended(RequestId("g-1"), attempt, reason, Usage(prompt_tokens=3), error_code=code)


def departure(*args, **kwargs):
    return departure_of(ended(*args, **kwargs), A, first_attempt=1)


def test_request_that_its_worker_gives_up_leaves_it():
    left = departure(EndReason.MOVED)
    assert (left.worker, left.reason, left.usage) == (A, LeaveReason.DRAIN, Usage(prompt_tokens=3))
    assert left.error.retryable


@pytest.mark.parametrize(
    "reason",
    [EndReason.FINISHED, EndReason.CANCELLED, EndReason.DEADLINE, EndReason.FAILED],
)
@pytest.mark.parametrize("attempt", [1, 2])
def test_other_ends_are_those_of_the_request(reason, attempt):
    assert departure(reason, attempt=attempt) is None


def test_request_that_fails_because_its_worker_stops_leaves_it():
    assert departure(EndReason.FAILED, "SHUTTING_DOWN").reason is LeaveReason.LOST
    assert departure(EndReason.FAILED, "WORKER_FAILED") is None


@pytest.mark.parametrize(
    ("code", "attempt", "leaves"),
    [
        ("OVERLOADED", 1, False),
        ("OVERLOADED", 2, True),
        ("NO_WORKER", 1, True),
        ("SHUTTING_DOWN", 2, True),
        ("REQUEST_INVALID", 2, False),
        ("REQUEST_TOO_LARGE", 2, False),
        ("", 2, False),
    ],
)
def test_refusal_sends_a_request_elsewhere_if_another_worker_may_take_it(code, attempt, leaves):
    left = departure(EndReason.REJECTED, code, attempt)
    assert (left is not None) == leaves
    if left is not None:
        assert left.reason is LeaveReason.REFUSED


def test_refusal_of_a_new_request_is_its_error():
    assert isinstance(outcome_of(ended(EndReason.REJECTED, "OVERLOADED")).error, OverloadedError)


def test_moved_is_no_end_of_a_request():
    with pytest.raises(InvariantError):
        outcome_of(ended(EndReason.MOVED))
