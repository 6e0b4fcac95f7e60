"""Describes the running cluster: what its workers say, and what the state store holds.

Requests need no state store, so a description does not end with it: what was read last is told on.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass
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
from configs.errors import StateStoreError, WorkerError
from configs.ids import WorkerId
from router.membership import Membership
from router.placement import Placement

STATS_TIMEOUT_S = 5.0
STATE_TIMEOUT_S = 5.0
"""As long as the workers get: a store that hangs must not use up the caller's time."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _State:
    membership: Membership
    placement: Placement


class ClusterTopology:
    """The `TopologySource` of a gateway in the cluster."""

    def __init__(self, plan: GatewayPlan, store: StateStore) -> None:
        self._plan = plan
        self._store = store
        self._reading: asyncio.Task[_State | StateStoreError] | None = None
        self._known: _State | None = None
        self._is_known_stale = False
        self._attention = [RemoteWorker(plan.cluster, name) for name in plan.attention_workers]
        self._experts = [RemoteWorker(plan.cluster, name) for name in plan.expert_workers]

    async def snapshot(self) -> TopologyView:
        """Ask everybody at once. A worker that is gone is listed with process id 0.

        Raises:
            StateStoreError: The state store does not answer and has never answered before.
        """
        state, attention, experts = await asyncio.gather(
            self._state(),
            asyncio.gather(*(_attention_view(worker) for worker in self._attention)),
            asyncio.gather(*(_expert_view(worker) for worker in self._experts)),
        )
        names = [WorkerId(view.name) for view in experts]
        return TopologyView(
            model=self._plan.model,
            attention_workers=tuple(attention),
            expert_workers=tuple(experts),
            membership_generation=state.membership.generation,
            layers=layer_views(state.placement, names),
            config_json=self._plan.config_json,
            cluster_id=self._plan.cluster,
            version=self._plan.version,
        )

    async def _state(self) -> _State:
        """Return what the store holds, or held when it last answered."""
        answer = await self._read_state()
        if isinstance(answer, _State):
            if self._is_known_stale:
                _logger.info("the state store answers again")
            self._known, self._is_known_stale = answer, False
            return answer
        if self._known is None:
            raise answer
        if not self._is_known_stale:
            _logger.warning("membership and placement are told as last read: %s", answer)
            self._is_known_stale = True
        return self._known

    async def _read_state(self) -> _State | StateStoreError:
        # One read at a time, which callers share: threads that hang must not pile up.
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(
                asyncio.to_thread(_read, self._store), name="read state"
            )
        try:
            async with asyncio.timeout(STATE_TIMEOUT_S):
                return await asyncio.shield(self._reading)
        except TimeoutError:
            return StateStoreError(f"the state store did not answer within {STATE_TIMEOUT_S:g} s")


def _read(store: StateStore) -> _State | StateStoreError:
    """Return errors too: nobody may be left waiting for them."""
    try:
        return _State(store.read_membership(), store.read_placement())
    except StateStoreError as exc:
        return exc


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
