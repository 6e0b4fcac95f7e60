"""The gateway: a gRPC and an HTTP server in front of attention workers. Plain asyncio, no Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from cluster.api.access.guard import AccessGuard
from cluster.api.access.http_connection import HttpAccess
from cluster.api.access.tls import TlsFiles
from cluster.api.gateway_settings import AttentionEndpoint, BoundAddresses, GatewaySettings
from cluster.api.grpc_server import ClusterSources, GrpcServer
from cluster.api.http_app import HealthReport, make_http_app
from cluster.api.http_server import HttpServer
from cluster.api.inference import Inference
from cluster.api.load import LoadSource, NoLoad
from cluster.api.openai.bodies import BodyLimits
from cluster.api.request_router import RequestRouter
from cluster.api.topology import TopologySource
from cluster.telemetry import Metrics, RequestTracer, make_tracer_provider
from configs.errors import ConfigError, ShuttingDownError
from model.tokenizer import Tokenizer

__all__ = ["AttentionEndpoint", "BoundAddresses", "Gateway", "GatewaySettings"]

GOODBYE_S: Final = 2.0
"""Time for the last status of requests that were ended by the gateway to reach their clients."""

_log = logging.getLogger(__name__)


class Gateway:
    """A running gateway. Made by `start`, belongs to the event loop that made it."""

    def __init__(
        self,
        settings: GatewaySettings,
        endpoints: Sequence[AttentionEndpoint],
        sources: ClusterSources,
        tokenizer: Tokenizer | None,
        tracer: RequestTracer,
    ) -> None:
        """Use `start`."""
        self._settings = settings
        self._tracer = tracer
        self.metrics = Metrics()
        self._router = RequestRouter(settings, endpoints, self.metrics)
        inference = Inference(
            settings, self._router, tokenizer=tokenizer, metrics=self.metrics, tracer=tracer
        )
        tls = None if settings.tls is None else TlsFiles.read(settings.tls, datetime.now(UTC))
        self._guard = AccessGuard.open(settings.access, self.metrics)
        self._http = HttpServer(
            make_http_app(
                self._health,
                self.metrics,
                inference,
                self._guard,
                BodyLimits(settings.max_message_bytes, settings.connections.receive_timeout_s),
            ),
            access=HttpAccess(
                self._guard.refusals,
                settings.connections,
                None if tls is None else tls.server_context(),
            ),
            host=settings.host,
            port=settings.http_port,
        )
        try:
            self._grpc = GrpcServer(settings, inference, sources, self.metrics, self._guard, tls)
        except ConfigError:
            self._http.close()
            raise
        self.bound = BoundAddresses(grpc=self._grpc.address, http=self._http.address)
        self._watch: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        settings: GatewaySettings,
        endpoints: Sequence[AttentionEndpoint],
        topology: TopologySource,
        *,
        load: LoadSource | None = None,
        tracer: RequestTracer | None = None,
    ) -> Gateway:
        """Bind both ports, connect to the workers and serve.

        A worker that cannot be reached at first is tried again, if another one can be.

        Args:
            settings: Of this gateway.
            endpoints: The attention workers.
            topology: Answers GetTopology.
            load: Answers GetLoadQuantiles; None says that nothing is recorded.
            tracer: Replaces the one that `settings.trace_exporter` names.

        Raises:
            PortInUseError: A port is taken.
            TransportError: No worker can be reached.
            CheckpointError: The tokenizer files are damaged.
            ConfigError: An address, the trace exporter, a TLS file or the key file cannot be used.
        """
        if tracer is None:
            tracer = RequestTracer(
                make_tracer_provider(settings.trace_exporter, service_instance=settings.gateway)
            )
        folder = settings.tokenizer_folder
        try:
            tokenizer = None if folder is None else await asyncio.to_thread(Tokenizer.load, folder)
            sources = ClusterSources(topology, NoLoad() if load is None else load)
            gateway = cls(settings, endpoints, sources, tokenizer, tracer)
        except BaseException:
            await asyncio.to_thread(tracer.shutdown)
            raise
        try:
            await gateway._serve()
        except BaseException:
            await gateway.stop()
            raise
        return gateway

    @property
    def num_running(self) -> int:
        """Accepted requests that have not ended for their clients."""
        return self._router.num_running

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones, `drain_timeout_s` at most.

        Health checks say NOT_SERVING from the start; what still runs at the end of the time ends
        with a retryable error. Idempotent.
        """
        self._router.drain()
        await self._publish_health()
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self._router.wait_idle()
        except TimeoutError:
            _log.warning(
                "gateway %s: %d requests still ran after %s s of draining",
                self._settings.gateway,
                self._router.num_running,
                self._settings.drain_timeout_s,
            )
            await self._fail_running()

    async def stop(self) -> None:
        """Close everything; running requests end with a retryable error. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(), name="gateway stop")
        await asyncio.shield(self._stopping)

    async def _serve(self) -> None:
        await self._router.connect()
        await self._publish_health()
        self._watch = asyncio.create_task(self._watch_health(), name="gateway health")
        await self._grpc.start()
        await self._http.start()

    async def _stop(self) -> None:
        self._router.drain()
        await self._fail_running()
        await self._grpc.stop(GOODBYE_S)
        await self._http.stop()
        await self._router.close()
        await self._guard.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await asyncio.to_thread(self._tracer.shutdown)

    async def _fail_running(self) -> None:
        self._router.fail_all(
            ShuttingDownError(
                f"the server is shutting down; running requests had "
                f"{self._settings.drain_timeout_s:g} s to finish (api.drain_timeout_s)"
            )
        )
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._router.wait_idle()
        except TimeoutError:
            _log.warning("%d clients did not read their last status", self._router.num_running)

    async def _watch_health(self) -> None:
        while True:
            await self._router.changed.wait()
            self._router.changed.clear()
            await self._publish_health()

    async def _publish_health(self) -> None:
        await self._grpc.set_serving(is_serving=self._router.is_serving)

    def _health(self) -> HealthReport:
        return HealthReport(
            status="serving" if self._router.is_serving else "not_serving",
            gateway=self._settings.gateway,
            connected_attention_workers=self._router.num_connected,
            running_requests=self._router.num_running,
        )
