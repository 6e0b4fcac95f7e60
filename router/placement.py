"""Placement: which workers hold a copy of which logical expert, per layer. Pure; no torch.

A layer's placement has its own epoch. `plan_initial_placement` spreads experts evenly; plans that
follow the load are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.errors import PlacementError
from configs.ids import Epoch, WorkerId


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """Holders of every expert of one layer."""

    layer: int
    epoch: Epoch
    holders: tuple[tuple[WorkerId, ...], ...]
    """Per logical expert the workers that hold a copy, at least one, each once."""

    def experts_of(self, worker: WorkerId) -> tuple[int, ...]:
        """Logical experts that `worker` holds, ascending."""
        return tuple(e for e, workers in enumerate(self.holders) if worker in workers)


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of all MoE layers."""

    layers: tuple[LayerPlacement, ...]

    def layer(self, layer: int) -> LayerPlacement:
        """Placement of one layer.

        Raises:
            PlacementError: The layer has no routed experts.
        """
        for placed in self.layers:
            if placed.layer == layer:
                return placed
        raise PlacementError(f"layer {layer} has no placement; placed: {self.layer_ids}")

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(placed.layer for placed in self.layers)


def plan_initial_placement(
    *, moe_layers: Sequence[int], num_experts: int, workers: Sequence[WorkerId]
) -> Placement:
    """Give every expert one copy, spread so that worker counts differ by at most one per layer.

    Layers start at different workers, so that the remainder does not always burden the same one.
    Any number of experts and workers; a worker may stay without experts in a layer.

    Raises:
        PlacementError: There is no worker, or a worker is named twice.
    """
    if not workers:
        raise PlacementError("no expert worker to place experts on; at least 1 is needed")
    if len(set(workers)) != len(workers):
        raise PlacementError(f"expert workers are named twice: {list(workers)}")
    layers = []
    for index, layer in enumerate(moe_layers):
        holders = tuple(
            (workers[(expert + index) % len(workers)],) for expert in range(num_experts)
        )
        layers.append(LayerPlacement(layer=layer, epoch=Epoch(1), holders=holders))
    return Placement(layers=tuple(layers))
