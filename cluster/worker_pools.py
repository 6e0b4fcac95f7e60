"""Both pools of a launch: from actors that are created to workers that are connected, and back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal

from actors.attention_worker_actor import AttentionWorkerActor
from actors.expert_worker_actor import ExpertWorkerActor
from actors.snapshot_transport import SnapshotPeer
from actors.worker_stats import WorkerIdentity
from cluster.launch_plan import LaunchPlan
from cluster.ray_gateway import RayGateway, Tick, WorkerCall, WorkerHandle, actor_name
from cluster.state_store import FencingToken, StateStore, WorkerRecord
from cluster.unwinding import Unwinding
from configs.errors import ServingError
from configs.ids import ClusterId, Generation
from router.membership import ExpertWorkerInfo, Membership

LOAD_TIMEOUT_S: Final = 3600.0
"""Reading a trillion-parameter checkpoint from network storage takes tens of minutes."""
STOP_TIMEOUT_S: Final = 15.0
_MARGIN_S: Final = 10.0

_logger = logging.getLogger(__name__)


class WorkerPools:
    """The workers of a launch. Every step puts its undoing on the stack before the next one."""

    def __init__(self, ray: RayGateway, plan: LaunchPlan, unwinding: Unwinding) -> None:
        """Nothing is created yet."""
        self._ray = ray
        self._plan = plan
        self._unwinding = unwinding
        self._attention: list[WorkerHandle] = []
        self._experts: list[WorkerHandle] = []
        self._identities: list[WorkerIdentity] = []
        self._answers: list[tuple[WorkerIdentity, ExpertWorkerInfo]] = []

    @property
    def handles(self) -> list[WorkerHandle]:
        """All workers, attention workers first."""
        return [*self._attention, *self._experts]

    def create(self, *, device: str) -> None:
        """Create all actors and return; their processes come up side by side.

        Raises:
            WorkerError: Ray refused one.
        """
        plan, ray = self._plan, self._ray
        num_gpus = 0.0
        if device == "cuda":
            num_gpus = min(1.0, ray.num_gpus() / (len(plan.experts) + len(plan.attention)))
        if not ray.is_private:
            # The processes of a private cluster end with it.
            self._unwinding.add("removing workers", lambda: ray.remove_workers(self.handles))
        create = partial(ray.create_worker, cluster=plan.cluster, num_gpus=num_gpus)
        for expert in plan.experts:
            handle = create(ExpertWorkerActor, worker=expert.worker, settings=expert)
            self._experts.append(handle)
        for attention in plan.attention:
            handle = create(AttentionWorkerActor, worker=attention.worker, settings=attention)
            self._attention.append(handle)

    def load(self, *, tick: Tick) -> None:
        """Load the weights of all workers at once.

        Raises:
            ServingError: What a worker raised; `WorkerError` when one is gone or too slow.
        """
        placement = self._plan.placement
        loaded = self._ray.call_all(
            [
                *(WorkerCall(handle, "load", (placement,)) for handle in self._experts),
                *(WorkerCall(handle, "load") for handle in self._attention),
            ],
            timeout_s=LOAD_TIMEOUT_S,
            tick=tick,
        )
        # Attention workers go first, so that nobody dispatches to an expert worker that has gone.
        self._unwinding.add("stopping expert workers", lambda: self._stop(self._experts))
        self._unwinding.add("stopping attention workers", lambda: self._stop(self._attention))
        self._answers = loaded[: len(self._experts)]
        self._identities = loaded[len(self._experts) :]

    def connect(
        self, store: StateStore, token: FencingToken, *, timeout_s: float, tick: Tick
    ) -> None:
        """Connect every attention worker with every expert worker, and write it all down.

        Args:
            store: Takes membership, placement and workers.
            token: The launch's.
            timeout_s: What one worker may take to connect to all others.
            tick: Called while waiting.

        Raises:
            ServingError: What a worker raised; `WorkerError` when one is gone or too slow.
            StateStoreError: The state cannot be written.
        """
        placement = self._plan.placement
        membership = Membership(
            generation=Generation(1), expert_workers=tuple(info for _, info in self._answers)
        )
        store.write_membership(membership, token=token)
        store.write_layers(placement.layers, token=token)
        addresses: list[str] = self._ray.call_all(
            [WorkerCall(handle, "connect", (membership, placement)) for handle in self._attention],
            timeout_s=2 * timeout_s + _MARGIN_S,
            tick=tick,
        )
        self._introduce_vaults(timeout_s=timeout_s, tick=tick)
        cluster = self._plan.cluster
        records = [
            _record(cluster, identity, "expert", info.addresses) for identity, info in self._answers
        ]
        records += [
            _record(cluster, identity, "attention", (address,))
            for identity, address in zip(self._identities, addresses, strict=True)
        ]
        store.write_workers(records, token=token)

    def _introduce_vaults(self, *, timeout_s: float, tick: Tick) -> None:
        """Tell every attention worker where the others take copies of its requests."""
        vaults: list[str] = self._ray.call_all(
            [WorkerCall(handle, "vault_address") for handle in self._attention],
            timeout_s=timeout_s + _MARGIN_S,
            tick=tick,
        )
        peers = tuple(
            SnapshotPeer(handle.worker, address)
            for handle, address in zip(self._attention, vaults, strict=True)
        )
        self._ray.call_all(
            [WorkerCall(handle, "set_peers", (peers,)) for handle in self._attention],
            timeout_s=timeout_s + _MARGIN_S,
            tick=tick,
        )

    def _stop(self, handles: Sequence[WorkerHandle]) -> None:
        for handle in handles:
            try:
                self._ray.call_all(
                    [WorkerCall(handle, "stop")], timeout_s=STOP_TIMEOUT_S, tick=_no_tick
                )
            except ServingError as exc:
                # Gone already, or stuck: its process is ended next.
                _logger.warning("worker %s did not stop: %s", handle.worker, exc)


def _record(
    cluster: ClusterId,
    identity: WorkerIdentity,
    role: Literal["attention", "expert"],
    addresses: tuple[str, ...],
) -> WorkerRecord:
    return WorkerRecord(
        worker=identity.worker,
        role=role,
        actor=actor_name(cluster, identity.worker),
        node_id=identity.node_id,
        pid=identity.pid,
        addresses=addresses,
    )


def _no_tick() -> None:
    """Nothing interrupts a stop."""
