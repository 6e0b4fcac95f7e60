import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cluster.api import status
from configs import errors

TREE = list(status.serving_error_classes())


class FailedCall(grpc.RpcError, grpc.Call):
    """A failed call as the sync client raises it, made from a status."""

    def __init__(self, code, details, metadata=()):
        self._values = (code, details, metadata)

    def code(self):
        return self._values[0]

    def details(self):
        return self._values[1]

    def trailing_metadata(self):
        return self._values[2]

    def initial_metadata(self):
        return ()

    def is_active(self):
        return False

    def time_remaining(self):
        return None

    def cancel(self):
        return False

    def add_callback(self, callback):
        return False


def failed_call(rich):
    plain = rpc_status.to_status(rich)
    return FailedCall(plain.code, plain.details, plain.trailing_metadata)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_every_exception_class_has_its_own_row(cls):
    assert cls in status.STATUS_OF


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_retryable_classes_and_only_they_have_a_retry_hint(cls):
    assert (status.STATUS_OF[cls].retry_after_s is not None) == cls.retryable


def test_codes_are_unique():
    assert len({cls.code for cls in TREE}) == len(TREE)


@pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)
def test_client_gets_the_class_and_message_that_the_server_raised(cls):
    error = status.from_grpc(failed_call(status.to_grpc(cls("value 3, allowed 1 to 2"))))
    assert (type(error), error.message) == (cls, "value 3, allowed 1 to 2")


def test_status_carries_reason_domain_and_metadata():
    rich = status.to_grpc(errors.InvalidRequestError("no"), {"gateway": "g0"})
    info = error_details_pb2.ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("REQUEST_INVALID", "latentmesh")
    assert dict(info.metadata) == {"gateway": "g0", "retryable": "false"}


def test_retryable_status_says_when_to_retry():
    rich = status.to_grpc(errors.OverloadedError("full"))
    retry = error_details_pb2.RetryInfo()
    assert rich.details[1].Unpack(retry)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 1.0


@pytest.mark.parametrize("char", ["a", "\u20ac", "\n"], ids=["ascii", "three-bytes", "control"])
def test_status_of_a_huge_message_fits_four_kib_of_trailers(char):
    rich = status.to_grpc(errors.OverloadedError(char * 100_000), {"gateway": "g" * 1000})
    percent_encoded = sum(
        1 if 0x20 <= byte < 0x7F and byte != 0x25 else 3 for byte in rich.message.encode()
    )
    base64_encoded = (len(rich.SerializeToString()) + 2) // 3 * 4
    assert percent_encoded + base64_encoded < 4096
    assert rich.message.endswith("...")


def test_internal_status_says_nothing_of_the_cause():
    rich = status.internal_status()
    error = status.from_grpc(failed_call(rich))
    assert (type(error), error.message) == (errors.InvariantError, status.INTERNAL_MESSAGE)


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.TransportError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelledError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.RequestTooLargeError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.UnsupportedError),
        (grpc.StatusCode.DATA_LOSS, errors.InvariantError),
    ],
    ids=lambda value: value.name if isinstance(value, grpc.StatusCode) else "",
)
def test_status_of_grpc_itself_becomes_one_of_our_classes(code, cls):
    error = status.from_grpc(FailedCall(code, "socket closed"))
    assert type(error) is cls
    assert "socket closed" in error.message


def test_status_whose_text_a_proxy_changed_is_judged_by_its_code():
    plain = rpc_status.to_status(status.to_grpc(errors.NoWorkerError("gone")))
    call = FailedCall(plain.code, "upstream reset", plain.trailing_metadata)
    assert type(status.from_grpc(call)) is errors.TransportError


def test_code_of_a_worker_becomes_its_class():
    assert type(status.error_of_code("OVERLOADED", "full")) is errors.OverloadedError


def test_unknown_code_of_a_worker_becomes_a_worker_error():
    error = status.error_of_code("NEW_CODE", "what")
    assert type(error) is errors.WorkerError
    assert "NEW_CODE" in error.message
