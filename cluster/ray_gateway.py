"""Every Ray call of the cluster: sessions, actors, the Serve application. Nobody else imports Ray.

Ray's exceptions become ours here. A failed call raises what the worker raised when that is one of
our errors, else `WorkerError`. No call waits without a deadline.

The thread that calls `RayGateway.start` must live until `stop`: the kernel ends a private cluster's
processes together with the thread that started them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.child_processes import adopt_orphans, end_descendants
from configs.environment import prepare_for_attached_ray, prepare_for_private_ray
from configs.errors import ConfigError, ServingError, WorkerError
from configs.ids import ClusterId, WorkerId
from configs.schema import RayConfig

NAMESPACE: Final = "latentmesh"
WORKER_CPUS: Final = 0.001
"""Cores that a worker claims from Ray. Threads are set by the configuration, not by Ray's count."""
CONCURRENCY_GROUPS: Final = {"health": 4, "waiting": 16, "watch": 1}
"""Threads of a worker's actor beside the one that runs `load` and `connect`."""
STATE_SERVER_NAME: Final = "valkey-server"
_POLL_S: Final = 0.2
_PROCESS_END_S: Final = 5.0

_untyped_ray: Any = ray
"""For the calls that Ray has no types for, or wrong ones."""
_logger = logging.getLogger(__name__)

Tick = Callable[[], None]
"""Called a few times a second while waiting; may raise to end the wait."""


@dataclass(frozen=True, slots=True)
class WorkerHandle:
    """A worker's actor, created and perhaps not running yet."""

    worker: WorkerId
    actor: Any


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """One method call on a worker."""

    handle: WorkerHandle
    method: str
    args: tuple[object, ...] = ()


def actor_name(cluster: ClusterId, worker: WorkerId) -> str:
    """Name of a worker's actor, as the Ray dashboard shows it."""
    return f"{cluster}:{worker}"


class RayGateway:
    """A Ray session of this process: a private cluster or a running one."""

    def __init__(self, *, is_private: bool, dashboard: str | None, address: str) -> None:
        self._is_private = is_private
        self._deploying: threading.Thread | None = None
        self.dashboard = dashboard
        """URL of the Ray dashboard, or None without one."""
        self.address = address
        """Address of Ray's control service, `host:port`."""

    @classmethod
    def start(cls, config: RayConfig, *, folder: Path) -> RayGateway:
        """Start a private cluster, or join the one that `config.address` names.

        Args:
            config: Settings.
            folder: For the session of a private cluster; at most 43 bytes of path.

        Raises:
            WorkerError: Ray did not start.
            ConfigError: No cluster answers at the address.
        """
        _silence_loggers()
        if config.address == "local":
            return cls._start_private(config, folder)
        return cls._attach(config)

    @classmethod
    def _start_private(cls, config: RayConfig, folder: Path) -> RayGateway:
        prepare_for_private_ray()
        adopt_orphans()
        port = None if config.dashboard_port == 0 else config.dashboard_port
        try:
            context = ray.init(
                address="local",
                namespace=NAMESPACE,
                include_dashboard=config.dashboard,
                dashboard_host="127.0.0.1",
                dashboard_port=port,
                object_store_memory=config.object_store_bytes,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                _temp_dir=str(folder),
            )
        except (RayError, RuntimeError, OSError, ValueError) as exc:
            cls(is_private=True, dashboard=None, address="").stop(timeout_s=_PROCESS_END_S)
            raise WorkerError(f"Ray did not start: {exc}") from exc
        return cls._of_context(context, is_private=True)

    @classmethod
    def _attach(cls, config: RayConfig) -> RayGateway:
        prepare_for_attached_ray()
        try:
            context = ray.init(
                address=config.address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.CRITICAL,
            )
        except (RayError, RuntimeError, OSError, ValueError) as exc:
            raise ConfigError(
                f"ray.address {config.address!r} cannot be joined: {exc}; "
                f"use local for a private cluster"
            ) from exc
        return cls._of_context(context, is_private=False)

    @classmethod
    def _of_context(cls, context: Any, *, is_private: bool) -> RayGateway:  # noqa: ANN401 - untyped
        url = context.dashboard_url
        return cls(
            is_private=is_private,
            dashboard=f"http://{url}" if url else None,
            address=str(context.address_info["gcs_address"]),
        )

    @property
    def is_private(self) -> bool:
        """Whether this process started the cluster and will end it."""
        return self._is_private

    def num_gpus(self) -> float:
        """GPUs of the cluster."""
        return float(_untyped_ray.cluster_resources().get("GPU", 0.0))

    def create_worker(
        self,
        actor_class: type,
        *,
        cluster: ClusterId,
        worker: WorkerId,
        settings: object,
        num_gpus: float,
    ) -> WorkerHandle:
        """Create the actor of a worker; returns before its process runs.

        Args:
            actor_class: Plain class whose methods name the `CONCURRENCY_GROUPS`.
            cluster: Goes into the name.
            worker: Goes into the name.
            settings: The one argument of its constructor.
            num_gpus: Part of a GPU that it claims.

        Raises:
            WorkerError: Ray refused it.
        """
        remote_class = _untyped_ray.remote(
            num_cpus=WORKER_CPUS,
            num_gpus=num_gpus,
            max_restarts=0,
            concurrency_groups=dict(CONCURRENCY_GROUPS),
        )(actor_class)
        try:
            actor = remote_class.options(
                name=actor_name(cluster, worker), namespace=NAMESPACE
            ).remote(settings)
        except (RayError, ValueError) as exc:
            raise WorkerError(f"worker {worker} cannot be created: {exc}") from exc
        return WorkerHandle(worker=worker, actor=actor)

    def call_all(self, calls: Sequence[WorkerCall], *, timeout_s: float, tick: Tick) -> list[Any]:
        """Make calls at once and return their results in order; the first failure ends the wait.

        Raises:
            ServingError: What a worker raised; `WorkerError` when one is gone or too slow.
        """
        deadline = time.monotonic() + timeout_s
        refs = [getattr(call.handle.actor, call.method).remote(*call.args) for call in calls]
        call_of = dict(zip(refs, calls, strict=True))
        pending = list(refs)
        while pending:
            tick()
            ready, pending = ray.wait(pending, num_returns=1, timeout=_POLL_S)
            for ref in ready:
                _get(ref, call_of[ref])
            if pending and time.monotonic() >= deadline:
                call = call_of[pending[0]]
                raise WorkerError(
                    f"worker {call.handle.worker} did not answer {call.method} in {timeout_s:g} s"
                )
        return [_get(ref, call_of[ref]) for ref in refs]

    @staticmethod
    def watch(handles: Sequence[WorkerHandle]) -> WorkerWatch:
        """Return a watch that tells which of the workers have ended."""
        return WorkerWatch(handles)

    def remove_workers(self, handles: Sequence[WorkerHandle]) -> None:
        """End the processes of workers at once; what is gone already is fine."""
        for handle in handles:
            try:
                ray.kill(handle.actor, no_restart=True)
            except (RayError, ValueError) as exc:
                _logger.debug("worker %s is gone already: %s", handle.worker, exc)

    def deploy(self, target: type, plan: object, *, name: str) -> Future[GatewayApplication]:
        """Deploy `target(plan)` as the one replica of a Serve application.

        Returns at once; the future ends when Serve has taken it, before the replica runs.
        """
        future: Future[GatewayApplication] = Future()

        def _deploy() -> None:
            try:
                future.set_result(self._deploy(target, plan, name=name))
            except (RayError, RayServeException, RuntimeError, OSError, ValueError) as exc:
                error = WorkerError(f"Ray Serve did not start the gateway: {exc}")
                error.__cause__ = exc
                future.set_exception(error)

        self._deploying = threading.Thread(target=_deploy, name="serve-deploy", daemon=True)
        self._deploying.start()
        return future

    def _deploy(self, target: type, plan: object, *, name: str) -> GatewayApplication:
        # The gateway has its own servers; Serve's proxies would be one more process and, for a
        # private cluster, a fixed port that a second cluster on this machine would also want.
        if self._is_private:
            serve.start(proxy_location="Disabled")
        deployment: Any = serve.deployment(
            target,
            name="Gateway",
            num_replicas=1,
            max_ongoing_requests=64,
            health_check_period_s=5,
            health_check_timeout_s=30,
            graceful_shutdown_timeout_s=5,
            ray_actor_options={"num_cpus": WORKER_CPUS, "resources": _this_node()},
        )
        target_app = serve.RunTarget(target=deployment.bind(plan), name=name, route_prefix=None)
        (handle,) = serve.run_many([target_app], wait_for_applications_running=False)
        return GatewayApplication(handle, name=name)

    def stop(self, *, timeout_s: float) -> None:
        """End the session; of a private cluster also every process, by force where needed."""
        # Ray ends the whole process, ours, when any thread still calls it after its shutdown. So
        # the deployment has to be through, and Serve's client has to be gone, before.
        if self._deploying is not None:
            self._deploying.join(timeout_s)
            if self._is_private:
                _run_bounded("serve-shutdown", serve.shutdown, timeout_s)
        _run_bounded("ray-shutdown", ray.shutdown, timeout_s)
        if not self._is_private:
            return
        # Workers end on their own when their node is gone; that takes a moment.
        alive = end_descendants(_is_of_ray, grace_s=_PROCESS_END_S, timeout_s=timeout_s)
        if alive:
            raise WorkerError(f"Ray's processes {[process.pid for process in alive]} do not end")


class GatewayApplication:
    """The deployed gateway."""

    def __init__(self, handle: DeploymentHandle[Any], *, name: str) -> None:
        self._handle = handle
        self._name = name

    def call(self, method: str, *, timeout_s: float, tick: Tick) -> Any:  # noqa: ANN401 - by method
        """Call a method of the replica.

        Raises:
            ServingError: What the gateway raised; `WorkerError` when it is gone or too slow.
        """
        response = getattr(self._handle, method).remote()
        deadline = time.monotonic() + timeout_s
        while True:
            tick()
            try:
                return response.result(timeout_s=_POLL_S)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise WorkerError(
                        f"the gateway did not answer {method} in {timeout_s:g} s"
                    ) from None
            except (RayError, RayServeException) as exc:
                raise _translated(exc, who="the gateway", method=method) from exc

    def delete(self) -> None:
        """Remove the application from Serve; other applications stay."""
        try:
            serve.delete(self._name)
        except (RayError, RayServeException, RuntimeError) as exc:
            _logger.warning("Serve application %s was not removed: %s", self._name, exc)


class WorkerWatch:
    """Tells once of each worker that has ended, however it ended."""

    def __init__(self, handles: Sequence[WorkerHandle]) -> None:
        # The call returns only when the worker stops, and fails when its process ends.
        self._workers: dict[Any, WorkerId] = {
            handle.actor.wait_until_stopped.remote(): handle.worker for handle in handles
        }

    @property
    def num_running(self) -> int:
        """Workers that have not been reported."""
        return len(self._workers)

    def ended(self, *, timeout_s: float) -> list[tuple[WorkerId, str]]:
        """Return workers that have ended since the last call, with the reason; wait for the first.

        Args:
            timeout_s: How long to wait when there is none.
        """
        if not self._workers:
            return []
        ready, _ = ray.wait(list(self._workers), num_returns=1, timeout=timeout_s)
        news = []
        for ref in ready:
            worker = self._workers.pop(ref)
            try:
                ray.get(ref, timeout=_POLL_S)
                news.append((worker, "it stopped"))
            except RayError as exc:
                news.append((worker, _first_line(exc)))
        return news


class RemoteWorker:
    """A worker of a cluster, found by name and called from an event loop of any process."""

    def __init__(self, cluster: ClusterId, worker: WorkerId) -> None:
        self.worker = worker
        self._name = actor_name(cluster, worker)
        self._actor: Any = None

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401 - by method
        """Call a method.

        Raises:
            ServingError: What the worker raised; `WorkerError` when it is gone or too slow.
        """
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(
                    ray.get_actor, self._name, namespace=NAMESPACE
                )
            return await asyncio.wait_for(getattr(self._actor, method).remote(*args), timeout_s)
        except TimeoutError as exc:
            raise WorkerError(
                f"worker {self.worker} did not answer {method} in {timeout_s:g} s"
            ) from exc
        except (RayError, ValueError) as exc:
            self._actor = None
            raise _translated(exc, who=f"worker {self.worker}", method=method) from exc


def _run_bounded(name: str, action: Callable[[], object], timeout_s: float) -> None:
    """Run a call of Ray's that takes no timeout; what it raises or lacks is logged, not raised."""

    def _run() -> None:
        try:
            action()
        except (RayError, RayServeException, RuntimeError, OSError) as exc:
            _logger.warning("%s failed: %s", name, exc)

    thread = threading.Thread(target=_run, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        _logger.warning("%s is not through after %g s", name, timeout_s)


def _get(ref: Any, call: WorkerCall) -> Any:  # noqa: ANN401 - Ray's references are untyped
    try:
        return ray.get(ref, timeout=_PROCESS_END_S)
    except RayError as exc:
        raise _translated(exc, who=f"worker {call.handle.worker}", method=call.method) from exc


def _translated(exc: Exception, *, who: str, method: str) -> ServingError:
    cause = exc.cause if isinstance(exc, RayTaskError) else None
    if isinstance(cause, ServingError):
        return cause
    if isinstance(exc, GetTimeoutError):
        return WorkerError(f"{who} did not answer {method} in time")
    if isinstance(exc, RayActorError):
        return WorkerError(f"{who} ended during {method}: {_first_line(exc)}")
    return WorkerError(f"{who} failed in {method}: {_last_line(exc)}")


def _first_line(exc: BaseException) -> str:
    return str(exc).strip().partition("\n")[0]


def _last_line(exc: BaseException) -> str:
    """Ray puts the remote traceback first and what went wrong last."""
    return str(exc).strip().rpartition("\n")[2]


def _this_node() -> Mapping[str, float]:
    return {f"node:{_untyped_ray.util.get_node_ip_address()}": 0.001}


def _is_of_ray(process: psutil.Process) -> bool:
    """Whether a descendant of ours belongs to Ray: all do, but the state server."""
    return process.name() != STATE_SERVER_NAME


def _silence_loggers() -> None:
    """Keep Ray's and Serve's own words out of the terminal; they are in the session's log files."""
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
