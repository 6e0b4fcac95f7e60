"""The one table from our exceptions to gRPC status, HTTP status and retry hint, and the way back.

A status carries `google.rpc.ErrorInfo` (reason = `ServingError.code`, domain `latentmesh`) and,
when a retry can help, `google.rpc.RetryInfo`. Both directions read the same table, so a client
raises the class that the server raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Final

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from configs import errors

DOMAIN: Final = "latentmesh"
DETAILS_KEY: Final = "grpc-status-details-bin"
INTERNAL_CODE: Final = "INTERNAL"
"""`ErrorInfo.reason` of a failure that is none of our exceptions."""
INTERNAL_MESSAGE: Final = "internal error; the server's log has the details"
MAX_MESSAGE_BYTES: Final = 800
"""Longer messages are cut: the text travels twice (percent-encoded, at worst three bytes for one,
and base64), and common proxies answer trailers over 4 KiB with an error of their own."""
MAX_METADATA_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class StatusRow:
    """How one exception class looks from outside."""

    grpc_code: grpc.StatusCode
    http_status: int
    retry_after_s: float | None = None
    """Earliest sensible retry, seconds; None when a retry cannot help."""


_CLIENT_CLOSED_REQUEST = 499  # not registered; nginx's number for "the client went away"

STATUS_OF: Final[Mapping[type[errors.ServingError], StatusRow]] = MappingProxyType(
    {
        errors.ServingError: StatusRow(grpc.StatusCode.INTERNAL, 500),
        errors.ConfigError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 500),
        errors.DataDirInUseError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 409),
        errors.PortInUseError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 409),
        errors.DeviceTooSmallError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 500),
        errors.CheckpointError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 500),
        errors.ModelConfigError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 500),
        errors.TokenizerMissingError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 400),
        errors.AdmissionError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 400),
        errors.InvalidRequestError: StatusRow(grpc.StatusCode.INVALID_ARGUMENT, 400),
        # Not RESOURCE_EXHAUSTED: clients retry that, and this request will never fit.
        errors.RequestTooLargeError: StatusRow(grpc.StatusCode.FAILED_PRECONDITION, 413),
        errors.UnknownModelError: StatusRow(grpc.StatusCode.NOT_FOUND, 404),
        errors.UnsupportedError: StatusRow(grpc.StatusCode.UNIMPLEMENTED, 501),
        errors.UnauthenticatedError: StatusRow(grpc.StatusCode.UNAUTHENTICATED, 401),
        errors.OverloadedError: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, 1.0),
        errors.RateLimitedError: StatusRow(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, 1.0),
        errors.RequestEndedError: StatusRow(grpc.StatusCode.INTERNAL, 500),
        errors.RequestCancelledError: StatusRow(grpc.StatusCode.CANCELLED, _CLIENT_CLOSED_REQUEST),
        errors.DeadlineError: StatusRow(grpc.StatusCode.DEADLINE_EXCEEDED, 504),
        errors.RoutingError: StatusRow(grpc.StatusCode.INTERNAL, 500),
        errors.FrameError: StatusRow(grpc.StatusCode.INTERNAL, 500),
        errors.PlacementError: StatusRow(grpc.StatusCode.INTERNAL, 500),
        errors.WorkerError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 0.5),
        errors.ShuttingDownError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 2.0),
        errors.NoWorkerError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 2.0),
        errors.SnapshotError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 0.5),
        errors.TransportError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 0.5),
        errors.PeerClosedError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 0.5),
        errors.TransportTimeoutError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 1.0),
        errors.StateStoreError: StatusRow(grpc.StatusCode.UNAVAILABLE, 503, 1.0),
        errors.InvariantError: StatusRow(grpc.StatusCode.INTERNAL, 500),
    }
)

# What a status without our ErrorInfo is taken for: it comes from gRPC itself or from a proxy.
_FOREIGN: Final[Mapping[grpc.StatusCode, type[errors.ServingError]]] = MappingProxyType(
    {
        grpc.StatusCode.UNAVAILABLE: errors.TransportError,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
        grpc.StatusCode.CANCELLED: errors.RequestCancelledError,
        grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
        # The servers' own refusals carry ErrorInfo; gRPC says this of a message over the limit.
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.RequestTooLargeError,
        grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedError,
        grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    }
)


def serving_error_classes() -> Iterator[type[errors.ServingError]]:
    """Every class of the exception tree that is loaded, the root first."""
    pending: list[type[errors.ServingError]] = [errors.ServingError]
    while pending:
        cls = pending.pop(0)
        yield cls
        pending.extend(cls.__subclasses__())


_CLASS_OF: Final[Mapping[str, type[errors.ServingError]]] = MappingProxyType(
    {cls.code: cls for cls in STATUS_OF}
)


def row_of(error: errors.ServingError) -> StatusRow:
    """Return the row of an error's class.

    Raises:
        InvariantError: The class has no row.
    """
    row = STATUS_OF.get(type(error))
    if row is None:
        raise errors.InvariantError(f"{type(error).__name__} has no row in cluster/api/status.py")
    return row


def retry_after_of(error: errors.ServingError) -> float | None:
    """Return the earliest sensible retry in seconds; None when a retry cannot help."""
    own = error.retry_after_s
    return row_of(error).retry_after_s if own is None else own


def error_of_code(code: str, message: str) -> errors.ServingError:
    """Return the exception of a stable code; `WorkerError` when the code is not known here."""
    cls = _CLASS_OF.get(code)
    if cls is None:
        return errors.WorkerError(f"{message} (unknown error code {code!r})")
    return cls(message)


def to_grpc(
    error: errors.ServingError, metadata: Mapping[str, str] = MappingProxyType({})
) -> status_pb2.Status:
    """Return the rich status of an error. Serialised and with its text it stays under 4 KiB.

    Args:
        error: Whose message is cut to `MAX_MESSAGE_BYTES`.
        metadata: For `ErrorInfo.metadata` beside `retryable`; values are cut.
    """
    row = row_of(error)
    facts = {"retryable": str(error.retryable).lower(), **metadata}
    details = [_packed(_error_info(error.code, facts))]
    retry_after_s = retry_after_of(error)
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromTimedelta(timedelta(seconds=retry_after_s))
        details.append(_packed(retry))
    return status_pb2.Status(
        code=_number_of(row.grpc_code),
        message=_cut(error.message, MAX_MESSAGE_BYTES),
        details=details,
    )


def internal_status(metadata: Mapping[str, str] = MappingProxyType({})) -> status_pb2.Status:
    """Return the status of a failure that is none of our exceptions: says nothing of its cause."""
    return status_pb2.Status(
        code=_number_of(grpc.StatusCode.INTERNAL),
        message=INTERNAL_MESSAGE,
        details=[_packed(_error_info(INTERNAL_CODE, metadata))],
    )


def from_grpc(error: grpc.RpcError) -> errors.ServingError:
    """Return the exception that a failed call stands for: the server's class where it named it."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.InvariantError(f"gRPC failed without a status: {error!r}")
    code, text = error.code(), error.details()
    message = "" if text is None else text
    reason = _reason_of(error)
    if reason is not None:
        return _CLASS_OF.get(reason, errors.InvariantError)(message)
    name = "no status" if code is None else code.name
    cls = errors.InvariantError if code is None else _FOREIGN.get(code, errors.InvariantError)
    return cls(f"{message} (gRPC status {name})")


def _reason_of(call: grpc.Call | grpc.aio.AioRpcError) -> str | None:
    try:
        status = rpc_status.from_call(call)
    except ValueError:  # a proxy changed code or text: what it says now is what counts
        return None
    if status is None:
        return None
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return str(info.reason)
    return None


def _error_info(reason: str, metadata: Mapping[str, str]) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(
        reason=reason,
        domain=DOMAIN,
        metadata={key: _cut(value, MAX_METADATA_BYTES) for key, value in metadata.items()},
    )


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _number_of(code: grpc.StatusCode) -> int:
    number: int = code.value[0]
    return number


def _cut(text: str, max_bytes: int) -> str:
    data = text.encode("utf-8", errors="replace")
    if len(data) <= max_bytes:
        return text
    return data[: max_bytes - 3].decode("utf-8", errors="ignore") + "..."


def http_status_of(error: errors.ServingError) -> int:
    """Return the HTTP status of an error."""
    return row_of(error).http_status
