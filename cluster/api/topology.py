"""What GetTopology describes, as frozen values, and their one way into the proto.

Whoever knows the cluster (the launcher, through Ray) makes a `TopologyView`; the gateway only asks
a `TopologySource` for one and converts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

from cluster.api.generated.latentmesh.v1 import inference_pb2
from configs.errors import InvariantError, TransportTimeoutError
from configs.ids import ClusterId, Generation, WorkerId
from router.placement import Placement

SNAPSHOT_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model that is served. Fields as in `latentmesh.v1.ModelInfo`."""

    name: str
    context_tokens: int
    vocab_size: int
    has_tokenizer: bool
    num_layers: int
    num_experts: int
    num_experts_per_token: int
    hidden_size: int
    latent_size: int


@dataclass(frozen=True, slots=True)
class AttentionWorkerView:
    """One attention worker. Fields as in `latentmesh.v1.AttentionWorker`."""

    name: WorkerId
    pid: int
    node_id: str
    running_requests: int = 0
    queued_requests: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    used_slots: int = 0
    total_slots: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    latent_bytes_sent: int = 0
    wire_bytes_sent: int = 0
    wire_bytes_received: int = 0
    latents_sent: int = 0
    memory_bytes: int = 0
    transports: tuple[str, ...] = ()
    """Transport to each expert worker, in the order of `TopologyView.expert_workers`."""
    cached_blocks: int = 0
    prefix_snapshots: int = 0
    snapshot_bytes: int = 0
    prefix_hits: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    restores: int = 0
    recomputed_tokens: int = 0
    moved_requests: int = 0


@dataclass(frozen=True, slots=True)
class ExpertWorkerView:
    """One expert worker. Fields as in `latentmesh.v1.ExpertWorker`."""

    name: WorkerId
    pid: int
    node_id: str
    num_expert_slots: int = 0
    weight_bytes: int = 0
    pairs: int = 0
    weight_reads: int = 0
    frames: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerPlacementView:
    """Placement of one layer; holders are indices into `TopologyView.expert_workers`."""

    layer: int
    epoch: int
    holders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TopologyView:
    """Description of a cluster at one moment. Fields as in `latentmesh.v1.GetTopologyResponse`."""

    model: ModelView
    attention_workers: tuple[AttentionWorkerView, ...]
    expert_workers: tuple[ExpertWorkerView, ...]
    membership_generation: Generation
    layers: tuple[LayerPlacementView, ...]
    config_json: str
    cluster_id: ClusterId
    version: str


class TopologySource(Protocol):
    """Where a gateway gets the description of its cluster."""

    async def snapshot(self) -> TopologyView:
        """Return the current description.

        Raises:
            ServingError: It cannot be had now (a worker or the state store is gone).
        """


async def take_snapshot(source: TopologySource) -> TopologyView:
    """Return the current description.

    Raises:
        TransportTimeoutError: It did not come within `SNAPSHOT_TIMEOUT_S`.
        ServingError: It cannot be had now.
    """
    try:
        async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
            return await source.snapshot()
    except TimeoutError as exc:
        raise TransportTimeoutError(
            f"the workers did not describe themselves within {SNAPSHOT_TIMEOUT_S} s; retry"
        ) from exc


def layer_views(
    placement: Placement, workers: Sequence[WorkerId]
) -> tuple[LayerPlacementView, ...]:
    """Return a placement with its holders as indices into `workers`, by layer.

    Raises:
        InvariantError: The placement names a worker that is not among `workers`.
    """
    index_of = {worker: index for index, worker in enumerate(workers)}
    views = []
    for placed in sorted(placement.layers, key=lambda layer: layer.layer):
        holders = tuple(_indices(names, index_of) for names in placed.holders)
        views.append(LayerPlacementView(layer=placed.layer, epoch=placed.epoch, holders=holders))
    return tuple(views)


def to_proto(view: TopologyView) -> inference_pb2.GetTopologyResponse:
    """Return the message of a view; nothing is left out."""
    return inference_pb2.GetTopologyResponse(
        model=inference_pb2.ModelInfo(**_values(view.model)),
        attention_workers=[
            inference_pb2.AttentionWorker(**_values(worker)) for worker in view.attention_workers
        ],
        expert_workers=[_expert_worker(worker) for worker in view.expert_workers],
        membership_generation=view.membership_generation,
        layers=[
            inference_pb2.LayerPlacement(
                layer=placed.layer,
                epoch=placed.epoch,
                experts=[inference_pb2.ExpertHolders(workers=held) for held in placed.holders],
            )
            for placed in view.layers
        ],
        config_json=view.config_json,
        cluster_id=view.cluster_id,
        version=view.version,
    )


def from_proto(message: inference_pb2.GetTopologyResponse) -> TopologyView:
    """Return the view of a message; the inverse of `to_proto`."""
    return TopologyView(
        model=_view(ModelView, message.model),
        attention_workers=tuple(
            _view(AttentionWorkerView, worker) for worker in message.attention_workers
        ),
        expert_workers=tuple(_expert_view(worker) for worker in message.expert_workers),
        membership_generation=Generation(message.membership_generation),
        layers=tuple(
            LayerPlacementView(
                layer=placed.layer,
                epoch=placed.epoch,
                holders=tuple(tuple(held.workers) for held in placed.experts),
            )
            for placed in message.layers
        ),
        config_json=message.config_json,
        cluster_id=ClusterId(message.cluster_id),
        version=message.version,
    )


_View = TypeVar("_View", ModelView, AttentionWorkerView)


def _view(kind: type[_View], message: object) -> _View:
    values = {field.name: getattr(message, field.name) for field in fields(kind)}
    if "transports" in values:
        values["transports"] = tuple(values["transports"])
    return kind(**values)


def _values(view: ModelView | AttentionWorkerView) -> dict[str, Any]:
    return {field.name: getattr(view, field.name) for field in fields(view)}


def _expert_worker(view: ExpertWorkerView) -> inference_pb2.ExpertWorker:
    return inference_pb2.ExpertWorker(
        name=view.name,
        pid=view.pid,
        node_id=view.node_id,
        num_expert_slots=view.num_expert_slots,
        weight_bytes=view.weight_bytes,
        pairs=view.pairs,
        weight_reads=view.weight_reads,
        frames=view.frames,
        busy_time=timedelta(seconds=view.busy_s),
    )


def _expert_view(message: inference_pb2.ExpertWorker) -> ExpertWorkerView:
    return ExpertWorkerView(
        name=WorkerId(message.name),
        pid=message.pid,
        node_id=message.node_id,
        num_expert_slots=message.num_expert_slots,
        weight_bytes=message.weight_bytes,
        pairs=message.pairs,
        weight_reads=message.weight_reads,
        frames=message.frames,
        busy_s=message.busy_time.ToTimedelta().total_seconds(),
    )


def _indices(names: Sequence[WorkerId], index_of: Mapping[WorkerId, int]) -> tuple[int, ...]:
    missing = [name for name in names if name not in index_of]
    if missing:
        raise InvariantError(
            f"placement names {missing}, which are not among the expert workers {list(index_of)}"
        )
    return tuple(index_of[name] for name in names)
