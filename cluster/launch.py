"""Starts a whole cluster, watches it, and takes it down again.

Everything that is started is put on a stack of things to undo before the next one starts, so that a
failure or a signal at any point leaves no process, socket or file. Slow parts start side by side:
Ray Serve with the gateway's replica, and all workers with their weights.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from actors.worker_settings import NODE_HOST
from cluster.api.access.tls import TlsFiles
from cluster.api.client import LatentmeshClient
from cluster.api.gateway_settings import BoundAddresses
from cluster.api.listening import bind_tcp
from cluster.data_folder import DataFolder
from cluster.launch_plan import LOOPBACK, plan_gateway, plan_launch, tls_settings
from cluster.ray_gateway import (
    GatewayApplication,
    RayGateway,
    WorkerHandle,
)
from cluster.ready_record import ReadyRecord, remove_record, write_record
from cluster.run_folder import RunFolder
from cluster.serve_gateway import GatewayReplica
from cluster.state_store import ClusterRecord, FencingToken, StateStore
from cluster.stop_request import StopRequest, StopRequestedError
from cluster.unwinding import Unwinding
from cluster.valkey import EmbeddedValkey
from cluster.worker_pools import LOAD_TIMEOUT_S, WorkerPools
from configs.environment import use_temporary_folder
from configs.errors import ServingError, WorkerError
from configs.ids import ClusterId, WorkerId
from configs.resolve import ResolvedConfig
from model.dims import ModelDims

GATEWAY_TIMEOUT_S: Final = 120.0
STOP_STEP_TIMEOUT_S: Final = 15.0
_MARGIN_S: Final = 10.0
_POLL_S: Final = 0.2

_logger = logging.getLogger(__name__)


class LaunchReporter(Protocol):
    """Told how a launch goes on. Called from the launch's thread."""

    def step(self, text: str) -> None:
        """Something has begun."""

    def ready(self, record: ReadyRecord) -> None:
        """Requests are served."""

    def worker_gone(self, worker: WorkerId, reason: str) -> None:
        """A worker ended that should not have."""

    def state_server_gone(self, reason: str) -> None:
        """The embedded state server ended that should not have; requests are still served."""

    def stopping(self) -> None:
        """The launch takes everything down."""


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """What to launch."""

    resolved: ResolvedConfig
    dims: ModelDims
    tokenizer_folder: Path | None
    """Folder with tokenizer files; None serves token ids only."""
    ready_file: Path | None
    """A second ready file beside the one in the data folder."""


class Launch:
    """One cluster from start to end. `run` once, from a thread of its own."""

    def __init__(
        self,
        order: LaunchOrder,
        *,
        data_folder: DataFolder,
        stop: StopRequest,
        reporter: LaunchReporter,
    ) -> None:
        """Nothing is started yet.

        Args:
            order: What to launch.
            data_folder: Locked and unlocked by the caller.
            stop: Asked by signals.
            reporter: Told how it goes on.
        """
        self._order = order
        self._serving = order.resolved.serving
        self._data_folder = data_folder
        self._stop = stop
        self._reporter = reporter
        self._unwinding = Unwinding()
        self._state_server: EmbeddedValkey | None = None
        self.cluster = ClusterId(secrets.token_hex(3))

    def run(self) -> bool:
        """Start, serve until asked to stop, and take everything down.

        Returns:
            Whether it served; False when it was asked to stop before.

        Raises:
            ServingError: The cluster did not start, or did not stop cleanly.
        """
        has_served = False
        try:
            handles = self._start()
            has_served = True
            self._watch(handles)
        except StopRequestedError:
            _logger.info("asked to stop while starting")
        finally:
            self._reporter.stopping()
            failed = self._unwinding.run()
        if failed:
            raise WorkerError(
                f"the cluster is down, but these steps failed: {', '.join(failed)}; see "
                f"{self._data_folder.log_folder}"
            )
        return has_served

    def _start(self) -> list[WorkerHandle]:
        version = importlib.metadata.version("latentmesh")
        self._check_api()
        run_folder = RunFolder.create(self._data_folder)
        self._unwinding.add("removing the run folder", run_folder.remove)
        use_temporary_folder(run_folder.temporary)
        state_url = self._start_state_server(run_folder)
        store = self._open_store(state_url)
        token = store.acquire_token()
        self._unwinding.add("removing the state", partial(self._remove_state, store, token))

        self._begin("starting Ray")
        ray = RayGateway.start(self._serving.ray, folder=run_folder.ray)
        self._unwinding.add("stopping Ray", partial(ray.stop, timeout_s=STOP_STEP_TIMEOUT_S))
        plan = plan_launch(
            self._order.resolved,
            self._order.dims,
            cluster=self.cluster,
            sockets=run_folder.sockets,
            host=LOOPBACK if ray.is_private else NODE_HOST,
        )
        store.write_cluster(
            ClusterRecord(cluster=self.cluster, version=version, config_json=plan.config_json),
            token=token,
        )

        self._begin("loading weights")
        pools = WorkerPools(ray, plan, self._unwinding)
        pools.create(device=self._order.resolved.device)
        # The replica comes up beside the workers and waits for them.
        deploying = ray.deploy(
            GatewayReplica,
            plan_gateway(
                plan,
                self._order.resolved,
                self._order.dims,
                version=version,
                state_url=state_url,
                tokenizer_folder=self._order.tokenizer_folder,
                start_timeout_s=LOAD_TIMEOUT_S,
            ),
            name=f"latentmesh-{self.cluster}",
        )
        self._unwinding.add("removing the gateway", partial(_retire_gateway, ray, deploying))
        pools.load(tick=self._stop.check_asked)

        self._begin("connecting workers")
        pools.connect(
            store,
            token,
            timeout_s=self._serving.router.connect_timeout_s,
            tick=self._stop.check_asked,
        )

        self._begin("starting the gateway")
        bound = self._open_gateway(deploying)
        self._announce(ray, bound)
        return pools.handles

    def _begin(self, text: str) -> None:
        self._stop.check_asked()
        self._reporter.step(text)
        _logger.info("%s", text)

    def _check_api(self) -> None:
        """Find a taken port or a bad file now rather than after the weights are loaded."""
        api = self._serving.api
        tls = tls_settings(api.tls)
        if tls is not None:
            # The gateway reads them again, on its node.
            TlsFiles.read(tls, datetime.now(UTC))
        for setting, port in (("api.grpc_port", api.grpc_port), ("api.http_port", api.http_port)):
            if port != 0:
                bind_tcp(api.host, port, setting=setting).close()

    def _start_state_server(self, run_folder: RunFolder) -> str:
        if self._serving.state.url != "embedded":
            return self._serving.state.url
        self._begin("starting the state server")
        server = EmbeddedValkey.start(
            folder=self._data_folder.path / "state",
            socket=run_folder.valkey_socket,
            log_file=self._data_folder.log_folder / "valkey.log",
        )
        self._unwinding.add("stopping the state server", server.stop)
        self._state_server = server
        return server.url

    def _open_store(self, url: str) -> StateStore:
        store = StateStore.connect(url, self.cluster)
        self._unwinding.add("closing the state store", store.close)
        if self._serving.state.url == "embedded":
            store.forget_other_clusters()
        return store

    def _remove_state(self, store: StateStore, token: FencingToken) -> None:
        if self._has_lost_state_server():
            # The next start forgets what the dead server's file holds of this cluster.
            _logger.warning("the state server is gone; the state is left to the next start")
            return
        store.remove_cluster(token=token)

    def _has_lost_state_server(self) -> bool:
        return self._state_server is not None and not self._state_server.is_running

    def _open_gateway(self, deploying: Future[GatewayApplication]) -> BoundAddresses:
        deadline = time.monotonic() + GATEWAY_TIMEOUT_S
        application = self._wait_deployed(deploying, deadline)
        bound: BoundAddresses = application.call(
            "bound", timeout_s=GATEWAY_TIMEOUT_S, tick=self._stop.check_asked
        )
        drain_s = self._serving.api.drain_timeout_s + _MARGIN_S
        self._unwinding.add("closing the gateway", partial(self._close, application, drain_s))
        if self._serving.api.tls.certificate is None:
            with LatentmeshClient(bound.grpc) as client:
                client.wait_ready(GATEWAY_TIMEOUT_S)
        # With TLS a check from here would need a certificate that only clients have; the gateway's
        # own word, that both its servers have started, has to do.
        return bound

    def _wait_deployed(
        self, deploying: Future[GatewayApplication], deadline: float
    ) -> GatewayApplication:
        while True:
            self._stop.check_asked()
            try:
                return deploying.result(_POLL_S)
            except FutureTimeoutError:
                if time.monotonic() >= deadline:
                    raise WorkerError(
                        f"Ray Serve did not start the gateway in {GATEWAY_TIMEOUT_S:g} s"
                    ) from None

    def _announce(self, ray: RayGateway, bound: BoundAddresses) -> None:
        record = ReadyRecord(
            cluster_id=self.cluster,
            grpc=bound.grpc,
            http=bound.http,
            dashboard=ray.dashboard,
            pid=os.getpid(),
            data_dir=str(self._data_folder.path),
            model=self._serving.api.model_name,
        )
        extra = self._order.ready_file
        paths = [self._data_folder.ready_file, *([] if extra is None else [extra.absolute()])]
        self._unwinding.add("removing the ready file", partial(remove_record, paths))
        write_record(record, paths)
        _logger.info("ready: %s", record)
        self._reporter.ready(record)

    def _watch(self, handles: Sequence[WorkerHandle]) -> None:
        """Report workers and a state server that end, until asked to stop.

        The cluster goes on while each pool has a worker left, although experts of a dead worker are
        missing; without a pool it can serve nothing and a supervisor should start it again.

        Raises:
            WorkerError: All workers of a pool are gone.
        """
        watch = RayGateway.watch(handles)
        left = {handle.worker for handle in handles}
        is_state_reported = False
        while not self._stop.is_asked:
            if not is_state_reported and self._has_lost_state_server():
                is_state_reported = True
                reason = f"it ended; see {self._data_folder.log_folder / 'valkey.log'}"
                _logger.error("the state server is gone: %s", reason)
                self._reporter.state_server_gone(reason)
            for worker, reason in watch.ended(timeout_s=_POLL_S):
                _logger.error("worker %s is gone: %s", worker, reason)
                self._reporter.worker_gone(worker, reason)
                left.discard(worker)
            for kind in ("attention", "expert"):
                if not any(worker.startswith(kind) for worker in left):
                    raise WorkerError(
                        f"no {kind} worker is left, so nothing can be served; see "
                        f"{self._data_folder.log_folder}, then start the cluster again"
                    )

    def _close(self, application: GatewayApplication, drain_s: float) -> None:
        """Drain unless asked twice, then close: clients hear of it before any worker goes."""
        try:
            application.call("drain", timeout_s=drain_s, tick=self._stop.check_asked_twice)
        except StopRequestedError:
            _logger.warning("asked twice: running requests are ended")
        except ServingError as exc:
            _logger.warning("not drained: %s", exc)
        _close_servers(application)


def _retire_gateway(ray: RayGateway, deploying: Future[GatewayApplication]) -> None:
    """Close the gateway's servers; on a shared cluster also remove its Serve application."""
    try:
        application = deploying.result(0 if ray.is_private else STOP_STEP_TIMEOUT_S)
    except (FutureTimeoutError, ServingError):
        # It never came up; a private cluster takes what there is of it along.
        return
    _close_servers(application)
    if not ray.is_private:
        application.delete()


def _close_servers(application: GatewayApplication) -> None:
    try:
        application.call("stop", timeout_s=STOP_STEP_TIMEOUT_S, tick=_no_tick)
    except ServingError as exc:
        # A replica that is gone has no servers either.
        _logger.warning("the gateway did not close: %s", exc)


def _no_tick() -> None:
    """Nothing interrupts a stop."""
