"""Describes the running cluster: what its workers say, and what the state store holds."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import cast

from actors.worker_stats import AttentionServiceStats, ExpertServiceStats, WorkerIdentity
from cluster.api.topology import (
    AttentionWorkerView,
    ExpertWorkerView,
    TopologyView,
    layer_views,
)
from cluster.launch_plan import GatewayPlan
from cluster.ray_gateway import RemoteWorker
from cluster.state_store import StateStore
from configs.errors import WorkerError
from configs.ids import WorkerId

STATS_TIMEOUT_S = 5.0


class ClusterTopology:
    """The `TopologySource` of a gateway in the cluster."""

    def __init__(self, plan: GatewayPlan, store: StateStore) -> None:
        self._plan = plan
        self._store = store
        self._attention = [RemoteWorker(plan.cluster, name) for name in plan.attention_workers]
        self._experts = [RemoteWorker(plan.cluster, name) for name in plan.expert_workers]

    async def snapshot(self) -> TopologyView:
        """Ask everybody at once. A worker that is gone is listed with process id 0.

        Raises:
            StateStoreError: The state store does not answer.
        """
        membership, placement, attention, experts = await asyncio.gather(
            asyncio.to_thread(self._store.read_membership),
            asyncio.to_thread(self._store.read_placement),
            asyncio.gather(*(_attention_view(worker) for worker in self._attention)),
            asyncio.gather(*(_expert_view(worker) for worker in self._experts)),
        )
        names = [WorkerId(view.name) for view in experts]
        return TopologyView(
            model=self._plan.model,
            attention_workers=tuple(attention),
            expert_workers=tuple(experts),
            membership_generation=membership.generation,
            layers=layer_views(placement, names),
            config_json=self._plan.config_json,
            cluster_id=self._plan.cluster,
            version=self._plan.version,
        )


async def _attention_view(worker: RemoteWorker) -> AttentionWorkerView:
    try:
        answer = await worker.call("stats", timeout_s=STATS_TIMEOUT_S)
    except WorkerError:
        return AttentionWorkerView(name=worker.worker, pid=0, node_id="")
    identity, stats = cast("tuple[WorkerIdentity, AttentionServiceStats]", answer)
    return AttentionWorkerView(
        name=worker.worker, pid=identity.pid, node_id=identity.node_id, **asdict(stats)
    )


async def _expert_view(worker: RemoteWorker) -> ExpertWorkerView:
    try:
        answer = await worker.call("stats", timeout_s=STATS_TIMEOUT_S)
    except WorkerError:
        return ExpertWorkerView(name=worker.worker, pid=0, node_id="")
    identity, stats = cast("tuple[WorkerIdentity, ExpertServiceStats]", answer)
    return ExpertWorkerView(
        name=worker.worker, pid=identity.pid, node_id=identity.node_id, **asdict(stats)
    )
