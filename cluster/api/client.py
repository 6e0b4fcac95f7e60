"""A synchronous client of the gRPC API, for the command line and for programs like it.

Raises the same exceptions as the server. One object may be used from several threads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from numpy.typing import NDArray

from cluster.api.answers import Chunk, Finished
from cluster.api.generated.latentmesh.v1 import (
    fabric_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from cluster.api.load import LoadQuestion, LoadView, read_load, write_question
from cluster.api.params import GenerateParams, ScoreParams
from cluster.api.proto_values import read_event, read_rows, write_generate, write_score
from cluster.api.status import from_grpc
from cluster.api.topology import TopologyView, from_proto
from configs.errors import InvariantError, TransportTimeoutError

MAX_RECEIVE_BYTES: Final = 256 << 20
TOPOLOGY_TIMEOUT_S: Final = 15.0
FLUSH_TIMEOUT_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class ClientAccess:
    """What a client shows to a server, and what it asks of it. PEM bytes."""

    api_key: str | None = field(default=None, repr=False)
    ca: bytes | None = None
    """Who signed the server's certificate; None speaks in the clear."""
    certificate: bytes | None = None
    """The client's own, where the server asks for one."""
    private_key: bytes | None = field(default=None, repr=False)


class LatentmeshClient:
    """A connection to one gateway. Connects on first use; close it, or use it in `with`."""

    def __init__(self, address: str, access: ClientAccess | None = None) -> None:
        """Take the server's `host:port`; nothing is sent yet.

        Args:
            address: Of the server.
            access: Key and TLS; None has neither.
        """
        self.address = address
        shown = ClientAccess() if access is None else access
        self._metadata = () if shown.api_key is None else (("x-api-key", shown.api_key),)
        self._channel = _open_channel(
            address,
            shown,
            options=[
                ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                # Two clients of one process must not share a connection and its flow control.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1_000),
            ],
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(  # type: ignore[no-untyped-call]  # generated
            self._channel
        )
        self._fabric = fabric_pb2_grpc.ExpertFabricServiceStub(  # type: ignore[no-untyped-call]  # generated
            self._channel
        )
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, params: GenerateParams, *, timeout_s: float | None = None
    ) -> Iterator[Chunk | Finished]:
        """Yield chunks as they come, and `Finished` for each choice. Closing it cancels.

        Args:
            params: What to generate; it is checked by the server.
            timeout_s: Deadline of the whole generation; None has none.

        Raises:
            ServingError: The class that the server raised, or `TransportError`.
        """
        call = self._inference.Generate(
            write_generate(params), timeout=timeout_s, metadata=self._metadata
        )
        num_finished = 0
        try:
            with _mapped_errors():
                for response in call:
                    event = read_event(response)
                    num_finished += isinstance(event, Finished)
                    yield event
        finally:
            call.cancel()
        if num_finished != params.num_choices:
            raise InvariantError(
                f"{self.address} ended the stream with {num_finished} of {params.num_choices} "
                "answers finished"
            )

    def score(self, params: ScoreParams, *, timeout_s: float | None = None) -> NDArray[np.float32]:
        """Return the logits of every prompt position, float32 `[T, vocab]`.

        Raises:
            ServingError: The class that the server raised, or `TransportError`.
        """
        parts: list[NDArray[np.float32]] = []
        num_rows = 0
        with _mapped_errors():
            for response in self._inference.Score(
                write_score(params), timeout=timeout_s, metadata=self._metadata
            ):
                rows = read_rows(response)
                if rows.first_position != num_rows:
                    raise InvariantError(
                        f"{self.address} sent logits of position {rows.first_position}, expected "
                        f"{num_rows}"
                    )
                parts.append(rows.logits)
                num_rows += len(rows.logits)
        if not parts:
            raise InvariantError(f"{self.address} sent no logits")
        return np.concatenate(parts)

    def topology(self, *, timeout_s: float = TOPOLOGY_TIMEOUT_S) -> TopologyView:
        """Return the description of the cluster.

        Raises:
            ServingError: The class that the server raised, or `TransportError`.
        """
        with _mapped_errors():
            request = inference_pb2.GetTopologyRequest()
            return from_proto(
                self._inference.GetTopology(request, timeout=timeout_s, metadata=self._metadata)
            )

    def load_quantiles(
        self, question: LoadQuestion, *, timeout_s: float = TOPOLOGY_TIMEOUT_S
    ) -> LoadView:
        """Return how much load experts have had over the last steps.

        Raises:
            ServingError: The class that the server raised, or `TransportError`.
        """
        with _mapped_errors():
            return read_load(
                self._fabric.GetLoadQuantiles(
                    write_question(question), timeout=timeout_s, metadata=self._metadata
                )
            )

    def flush_cache(self, *, timeout_s: float = FLUSH_TIMEOUT_S) -> int:
        """Make every worker forget its cached prefixes, and return how many that were.

        Raises:
            ServingError: The class that the server raised, or `TransportError`.
        """
        with _mapped_errors():
            response = self._inference.FlushCache(
                inference_pb2.FlushCacheRequest(), timeout=timeout_s, metadata=self._metadata
            )
        return int(response.num_snapshots)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server says that it takes requests.

        Raises:
            TransportTimeoutError: It did not in time; says what it said last.
        """
        deadline = time.monotonic() + timeout_s
        last = "it cannot be reached"
        while (left_s := deadline - time.monotonic()) > 0:
            watch = self._health.Watch(
                health_pb2.HealthCheckRequest(), timeout=left_s, wait_for_ready=True
            )
            try:
                for response in watch:
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    last = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
            except grpc.RpcError as exc:
                if exc.code() not in _WORTH_WAITING:
                    raise from_grpc(exc) from exc
            finally:
                watch.cancel()
        raise TransportTimeoutError(
            f"{self.address} is not ready after {timeout_s} s ({last}); is a server running there?"
        )

    def close(self) -> None:
        """End the connection; open streams are cancelled. Idempotent."""
        self._channel.close()


def _open_channel(
    address: str, access: ClientAccess, options: list[tuple[str, int]]
) -> grpc.Channel:
    if access.ca is None:
        return grpc.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=access.ca,
        private_key=access.private_key,
        certificate_chain=access.certificate,
    )
    return grpc.secure_channel(address, credentials, options=options)


_WORTH_WAITING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@contextmanager
def _mapped_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as exc:
        raise from_grpc(exc) from exc
