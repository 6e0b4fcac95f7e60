"""The gRPC server: InferenceService, ExpertFabricService, VllmEngine, health and reflection."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from cluster.api.access.guard import AccessGuard
from cluster.api.access.tls import TlsFiles
from cluster.api.error_barrier import ErrorBarrier
from cluster.api.fabric_servicer import DESCRIPTOR as FABRIC_DESCRIPTOR
from cluster.api.fabric_servicer import SERVICE as FABRIC_SERVICE
from cluster.api.fabric_servicer import FabricServicer
from cluster.api.gateway_settings import GatewaySettings
from cluster.api.generated.latentmesh.v1 import (
    fabric_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from cluster.api.grpc_call import call_of
from cluster.api.inference import Inference
from cluster.api.listening import bind_tcp, format_address
from cluster.api.load import LoadSource
from cluster.api.proto_values import read_generate, read_score, write_event, write_rows
from cluster.api.topology import TopologySource, take_snapshot, to_proto
from cluster.api.vllm_adapter import DESCRIPTOR as VLLM_DESCRIPTOR
from cluster.api.vllm_adapter import SERVICE as VLLM_SERVICE
from cluster.api.vllm_adapter import VllmEngineServicer
from cluster.telemetry import Metrics
from configs.errors import ConfigError, WorkerError

_DESCRIPTOR: Final = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
SERVICE: Final = _DESCRIPTOR.full_name

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic for type checkers only


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """latentmesh.v1.InferenceService. Exceptions are the barrier's business."""

    def __init__(self, inference: Inference, topology: TopologySource) -> None:
        self._inference = inference
        self._topology = topology

    # Streams are written, not yielded: a client that leaves shows as CancelledError here, inside
    # the request, and not in a generator that nobody closes.

    async def Generate(  # noqa: N802 - named by the proto
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> None:
        """See the proto."""
        answer = self._inference.generate(read_generate(request), call_of(context))
        async with aclosing(answer):
            async for event in answer:
                await context.write(write_event(event))

    async def Score(  # noqa: N802 - named by the proto
        self, request: inference_pb2.ScoreRequest, context: _Context
    ) -> None:
        """See the proto."""
        answer = self._inference.score(read_score(request), call_of(context))
        async with aclosing(answer):
            async for rows in answer:
                await context.write(write_rows(rows))

    async def GetTopology(  # noqa: N802 - named by the proto
        self, request: inference_pb2.GetTopologyRequest, context: _Context
    ) -> inference_pb2.GetTopologyResponse:
        """See the proto."""
        del request, context
        return to_proto(await take_snapshot(self._topology))

    async def FlushCache(  # noqa: N802 - named by the proto
        self, request: inference_pb2.FlushCacheRequest, context: _Context
    ) -> inference_pb2.FlushCacheResponse:
        """See the proto."""
        del request, context
        flushed = await self._inference.flush_cache()
        if flushed.failed:
            raise WorkerError(
                f"{flushed.describe_failures()}; the others forgot {flushed.num_snapshots} "
                "prefixes: call FlushCache again"
            )
        return inference_pb2.FlushCacheResponse(num_snapshots=flushed.num_snapshots)


@dataclass(frozen=True, slots=True)
class ClusterSources:
    """What a gateway tells of its cluster."""

    topology: TopologySource
    load: LoadSource


class GrpcServer:
    """One gRPC server. Bound by its constructor, answering after `start`."""

    def __init__(
        self,
        settings: GatewaySettings,
        inference: Inference,
        sources: ClusterSources,
        metrics: Metrics,
        guard: AccessGuard,
        tls: TlsFiles | None,
    ) -> None:
        """Bind the port.

        Args:
            settings: Of the gateway.
            inference: Answers.
            sources: Answer GetTopology and GetLoadQuantiles.
            metrics: Counts failures.
            guard: Lets callers in.
            tls: Encrypts; None serves in the clear.

        Raises:
            PortInUseError: Somebody else listens there.
            ConfigError: The address cannot be bound.
        """
        self._server = grpc.aio.server(
            interceptors=[
                ErrorBarrier(
                    (_DESCRIPTOR, FABRIC_DESCRIPTOR, VLLM_DESCRIPTOR),
                    settings.gateway,
                    metrics,
                    guard,
                )
            ],
            options=_options(settings),
        )
        self._health = health.aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            InferenceServicer(inference, sources.topology), self._server
        )
        fabric_pb2_grpc.add_ExpertFabricServiceServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            FabricServicer(sources.load), self._server
        )
        self._vllm = VllmEngineServicer(settings, inference, sources.topology)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._vllm, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (
                SERVICE,
                FABRIC_SERVICE,
                VLLM_SERVICE,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            ),
            self._server,
        )
        port = self._bind(settings.host, settings.grpc_port, tls)
        self.address = format_address(settings.host, port)

    async def start(self) -> None:
        """Answer calls."""
        await self._server.start()

    async def set_serving(self, *, is_serving: bool) -> None:
        """Publish to health checks whether requests are taken."""
        self._vllm.is_serving = is_serving
        serving = health_pb2.HealthCheckResponse.ServingStatus
        status = serving.SERVING if is_serving else serving.NOT_SERVING
        for service in ("", SERVICE, FABRIC_SERVICE, VLLM_SERVICE):
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Close the port, then the calls: those that do not end within `grace_s` are cancelled."""
        await self._server.stop(grace_s)

    def _bind(self, host: str, port: int, tls: TlsFiles | None) -> int:
        address = format_address(host, port)
        try:
            if tls is None:
                return self._server.add_insecure_port(address)
            credentials = grpc.ssl_server_credentials(
                [(tls.private_key, tls.certificate)],
                root_certificates=tls.client_ca,
                require_client_auth=tls.client_ca is not None,
            )
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as exc:
            # gRPC does not say why; binding the address ourselves does.
            bind_tcp(host, port, setting="api.grpc_port").close()
            raise ConfigError(
                f"api.host and api.grpc_port: {address} cannot be bound: {exc}"
            ) from exc


def _options(settings: GatewaySettings) -> list[tuple[str, int]]:
    connections = settings.connections
    return [
        # Else a second server binds the same port without an error and takes half the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        # Clients may ping as they like: never GOAWAY "too_many_pings".
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # Finds clients that vanished without closing, so that their requests are cancelled.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Long-lived connections never see a new gateway otherwise.
        ("grpc.max_connection_age_ms", round(connections.max_age_s * 1e3)),
        ("grpc.max_connection_age_grace_ms", round(connections.age_grace_s * 1e3)),
        ("grpc.max_concurrent_streams", connections.max_streams),
        ("grpc.max_metadata_size", connections.max_header_bytes),
        ("grpc.absolute_max_metadata_size", connections.max_header_bytes),
    ]
