"""The one exception tree of Latentmesh.

Every failure a user or peer can cause is one of these classes. Each has a stable `code` (it
travels in `google.rpc.ErrorInfo.reason`), a `retryable` flag, and a message that states the value,
the limit and the next step. `cluster/api/status.py` maps each class once to gRPC and HTTP status.

Foreign exceptions (Ray, sockets, safetensors, gRPC) are translated where they enter, with
`raise ... from exc`.
"""

from __future__ import annotations

from typing import ClassVar


class ServingError(Exception):
    """Root of the tree. Never raised itself."""

    code: ClassVar[str] = "SERVING_ERROR"
    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None
    """Earliest sensible retry when this one error knows better than the table of statuses."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(ServingError):
    """A configuration file, flag or environment value cannot be used. Names the key."""

    code = "CONFIG_INVALID"


class DataDirInUseError(ConfigError):
    """Another cluster holds the lock of this data folder."""

    code = "DATA_DIR_IN_USE"


class PortInUseError(ConfigError):
    """A port that was asked for is taken."""

    code = "PORT_IN_USE"


class DeviceTooSmallError(ConfigError):
    """The model does not fit the device; the message states both sizes in bytes."""

    code = "DEVICE_TOO_SMALL"


class CheckpointError(ServingError):
    """A checkpoint folder is missing, incomplete, of another model, or has wrong tensors."""

    code = "CHECKPOINT_INVALID"


class ModelConfigError(CheckpointError):
    """`config.json` lacks a value or holds one that this implementation does not compute."""

    code = "MODEL_CONFIG_INVALID"


class TokenizerMissingError(CheckpointError):
    """The checkpoint has no tokenizer files: token ids work, text does not."""

    code = "TOKENIZER_MISSING"


class AdmissionError(ServingError):
    """A request was refused before it ran."""

    code = "REQUEST_REFUSED"


class InvalidRequestError(AdmissionError):
    """A field of the request is out of range. Names field, value and allowed range."""

    code = "REQUEST_INVALID"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field
        """The field concerned, as its protocol calls it; "" where that is not known."""


class RequestTooLargeError(AdmissionError):
    """The request can never fit the memory of a worker."""

    code = "REQUEST_TOO_LARGE"


class UnknownModelError(AdmissionError):
    """The request names a model that this cluster does not serve."""

    code = "MODEL_UNKNOWN"


class UnsupportedError(AdmissionError):
    """The operation exists in the protocol and is not offered here."""

    code = "UNSUPPORTED"


class UnauthenticatedError(AdmissionError):
    """The call carries no key, an unknown one, or one that expired or was revoked."""

    code = "UNAUTHENTICATED"


class OverloadedError(AdmissionError):
    """Queues are full; try again later."""

    code = "OVERLOADED"
    retryable = True


class RateLimitedError(OverloadedError):
    """The key's limit of requests per minute, or of requests at once, is reached."""

    code = "RATE_LIMITED"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestEndedError(ServingError):
    """An accepted request ended without finishing."""

    code = "REQUEST_ENDED"


class RequestCancelledError(RequestEndedError):
    """The client cancelled the request."""

    code = "REQUEST_CANCELLED"


class DeadlineError(RequestEndedError):
    """The request's deadline passed before it finished."""

    code = "REQUEST_DEADLINE"


class RoutingError(ServingError):
    """A dispatch cannot be planned, or a frame does not belong here."""

    code = "ROUTING_FAILED"


class FrameError(RoutingError):
    """Bytes on the data plane are not a valid frame. States field, value and limit."""

    code = "FRAME_INVALID"


class PlacementError(ServingError):
    """A placement breaks a constraint. States expert, worker and limit."""

    code = "PLACEMENT_INVALID"


class WorkerError(ServingError):
    """A worker failed or is gone."""

    code = "WORKER_FAILED"
    retryable = True


class NoWorkerError(WorkerError):
    """No attention worker can take the request now."""

    code = "NO_WORKER"


class ShuttingDownError(WorkerError):
    """The server is being stopped: it takes no request, and ends those that did not finish in time.

    Retry on another server, or when it is up again.
    """

    code = "SHUTTING_DOWN"


class SnapshotError(WorkerError):
    """A copy of a request's memory is missing, damaged, or of another request or model."""

    code = "SNAPSHOT_INVALID"


class TransportError(ServingError):
    """A data-plane or request-channel connection failed. Names the peer."""

    code = "TRANSPORT_FAILED"
    retryable = True


class PeerClosedError(TransportError):
    """The peer closed the connection."""

    code = "PEER_CLOSED"


class TransportTimeoutError(TransportError):
    """A wait passed its deadline. Names peer, layer and step."""

    code = "TRANSPORT_TIMEOUT"


class StateStoreError(ServingError):
    """Redis (or the embedded Valkey) cannot be reached or refused a write."""

    code = "STATE_STORE_FAILED"
    retryable = True


class InvariantError(ServingError):
    """Something impossible happened. The message carries the counters."""

    code = "INTERNAL_INVARIANT"
