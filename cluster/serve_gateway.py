"""The gateway as a replica of a Ray Serve deployment.

Serve starts, watches and restarts it; requests never pass through Serve. The gateway runs in the
replica's event loop and opens its own servers there. It waits for the attention workers itself, so
that a replica that Serve made anew finds its way without the launcher.
"""

from __future__ import annotations

import asyncio
import logging

from cluster.api.gateway import Gateway
from cluster.api.gateway_settings import AttentionEndpoint, BoundAddresses
from cluster.cluster_load import ClusterLoad
from cluster.cluster_topology import ClusterTopology
from cluster.launch_plan import GatewayPlan
from cluster.ray_gateway import RemoteWorker
from cluster.state_store import StateStore
from configs.ids import WorkerId

_WAIT_MARGIN_S = 5.0

_logger = logging.getLogger(__name__)


class GatewayReplica:
    """One gateway. Constructed in the replica's event loop; starts at once, in the background."""

    def __init__(self, plan: GatewayPlan) -> None:
        self._plan = plan
        self._store: StateStore | None = None
        self._starting = asyncio.get_running_loop().create_task(self._start(), name="gateway start")

    async def bound(self) -> BoundAddresses:
        """Return the addresses once requests are taken.

        Raises:
            ServingError: The gateway did not start.
        """
        gateway = await asyncio.shield(self._starting)
        return gateway.bound

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones; see `Gateway.drain`."""
        if self._is_running():
            await self._starting.result().drain()

    async def stop(self) -> None:
        """Close everything. Idempotent."""
        if self._is_running():
            await self._starting.result().stop()
        else:
            self._starting.cancel()
        if self._store is not None:
            self._store.close()
            self._store = None

    async def check_health(self) -> None:
        """Tell Serve to replace this replica when its gateway did not start."""
        if self._starting.done():
            self._starting.result()

    def _is_running(self) -> bool:
        task = self._starting
        return task.done() and not task.cancelled() and task.exception() is None

    async def _start(self) -> Gateway:
        plan = self._plan
        endpoints = await asyncio.gather(
            *(self._endpoint(worker) for worker in plan.attention_workers)
        )
        self._store = await asyncio.to_thread(StateStore.connect, plan.state_url, plan.cluster)
        gateway = await Gateway.start(
            plan.settings,
            endpoints,
            ClusterTopology(plan, self._store),
            load=ClusterLoad(plan.cluster, plan.attention_workers),
        )
        _logger.info("gateway %s serves at %s", plan.settings.gateway, gateway.bound)
        return gateway

    async def _endpoint(self, worker: WorkerId) -> AttentionEndpoint:
        timeout_s = self._plan.start_timeout_s
        address: str = await RemoteWorker(self._plan.cluster, worker).call(
            "wait_until_serving", timeout_s, timeout_s=timeout_s + _WAIT_MARGIN_S
        )
        return AttentionEndpoint(worker=worker, address=address)
