"""The experts one worker holds: slots per layer, their memory, and the grouped FFN over them.

Several epochs of a layer's placement may be valid at once, while steps that use the old one end.

Shapes: P pairs, L latent size, E logical experts of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.expert_merge import PairBatch
from configs.errors import DeviceTooSmallError, PlacementError
from configs.ids import Epoch, WorkerId
from configs.numerics import Numerics
from model.experts import Activation, grouped_expert_ffn
from model.weight_tree import ExpertWeights
from router.placement import LayerPlacement, Placement


class ExpertSource(Protocol):
    """Where experts are loaded from; a checkpoint is one."""

    def load_expert(
        self, layer: int, expert: int, *, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        """Load one routed expert."""

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that `load_expert` allocates for any one expert."""


class LoadProgress(Protocol):
    """Told how loading goes on."""

    def advance(self, num_bytes: int) -> None:
        """Count loaded bytes."""


@dataclass(frozen=True, slots=True)
class ExpertStoreSettings:
    """How a worker keeps and computes experts."""

    latent_size: int
    activation: Activation
    numerics: Numerics
    dtype: torch.dtype
    """Compute dtype; experts that are stored dense are cast to it."""
    device: torch.device
    memory_bytes: int | None = None
    """Budget for expert slots; None leaves it to the machine."""


@dataclass
class _LayerSlots:
    """Slots of one layer."""

    experts: dict[int, ExpertWeights]
    is_held_E: NDArray[np.bool_]
    epochs: set[Epoch]


class ExpertStore:
    """Expert slots of one worker. Owned by one thread."""

    def __init__(self, *, worker: WorkerId, settings: ExpertStoreSettings) -> None:
        """Start empty."""
        self._worker = worker
        self._settings = settings
        self._layers: dict[int, _LayerSlots] = {}

    @property
    def latent_size(self) -> int:
        """Values of a latent."""
        return self._settings.latent_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all experts held."""
        return sum(
            weights.num_bytes
            for slots in self._layers.values()
            for weights in slots.experts.values()
        )

    @property
    def num_experts(self) -> int:
        """Physical experts held, over all layers."""
        return sum(len(slots.experts) for slots in self._layers.values())

    def experts_of(self, layer: int) -> tuple[int, ...]:
        """Logical experts held of a layer, ascending."""
        slots = self._layers.get(layer)
        return () if slots is None else tuple(sorted(slots.experts))

    def load(
        self, placement: Placement, source: ExpertSource, *, progress: LoadProgress | None = None
    ) -> None:
        """Load this worker's experts of `placement` that it does not hold, and accept its epochs.

        Experts and epochs of earlier placements stay until `retire`.

        Args:
            placement: Of all layers; other workers' experts are ignored.
            source: Where weights come from.
            progress: Advanced by loaded bytes.

        Raises:
            DeviceTooSmallError: The slots would pass the budget; nothing was loaded.
            CheckpointError: The source lacks an expert.
        """
        missing = {
            placed.layer: [
                expert
                for expert in placed.experts_of(self._worker)
                if not self._holds(placed.layer, expert)
            ]
            for placed in placement.layers
        }
        settings = self._settings
        self._check_budget(
            sum(len(experts) for experts in missing.values()), source.expert_bytes(settings.dtype)
        )
        for placed in placement.layers:
            slots = self._slots(placed)
            for expert in missing[placed.layer]:
                weights = source.load_expert(
                    placed.layer, expert, dtype=settings.dtype, device=settings.device
                )
                slots.experts[expert] = weights
                slots.is_held_E[expert] = True
                if progress is not None:
                    progress.advance(weights.num_bytes)
            slots.epochs.add(placed.epoch)

    def retire(self, placement: Placement) -> None:
        """Drop every expert and epoch that `placement` does not name for this worker."""
        kept = {placed.layer: placed for placed in placement.layers}
        for layer in list(self._layers):
            if layer not in kept:
                del self._layers[layer]
                continue
            slots = self._layers[layer]
            slots.epochs &= {kept[layer].epoch}
            for expert in set(slots.experts) - set(kept[layer].experts_of(self._worker)):
                del slots.experts[expert]
                slots.is_held_E[expert] = False

    def check(self, layer: int, epoch: Epoch, experts_P: NDArray[np.uint32]) -> None:
        """Raise unless pairs of a layer can be computed here.

        Raises:
            PlacementError: The layer, the epoch or an expert is not here; names it and what is.
        """
        slots = self._layers.get(layer)
        if slots is None:
            raise PlacementError(
                f"{self._worker} holds no experts of layer {layer}; layers: {sorted(self._layers)}"
            )
        if epoch not in slots.epochs:
            raise PlacementError(
                f"{self._worker} knows epochs {sorted(slots.epochs)} of layer {layer}, "
                f"the frame is of epoch {epoch}"
            )
        try:
            is_held_P = slots.is_held_E.take(experts_P)
        except IndexError as exc:
            raise PlacementError(
                f"layer {layer} has experts 0..{slots.is_held_E.size - 1}, "
                f"the frame names {int(experts_P.max())}"
            ) from exc
        if np.count_nonzero(is_held_P) != is_held_P.size:
            expert = int(experts_P[~is_held_P][0])
            raise PlacementError(
                f"{self._worker} does not hold expert {expert} of layer {layer}; it holds "
                f"{len(slots.experts)}: {_shorten(self.experts_of(layer))}"
            )

    def run(self, batch: PairBatch) -> tuple[Tensor, int]:
        """Compute all pairs of a batch, reading each expert's weights once.

        Args:
            batch: Checked pairs of one layer.

        Returns:
            Pair answers `[P, L]` in the order of the pairs, compute dtype, CPU; and the number of
            experts whose weights were read.
        """
        settings = self._settings
        if not batch.rows_P.size:
            return torch.empty(0, settings.latent_size, dtype=settings.dtype), 0
        slots = self._layers[batch.layer]
        order_P = batch.experts_P.argsort(kind="stable")
        starts = _run_starts(batch.experts_P.take(order_P))
        experts = batch.experts_P.take(order_P.take(starts)).tolist()
        counts = np.diff(starts, append=order_P.size).tolist()
        with torch.inference_mode():
            z_PL = batch.gather(order_P).to(settings.dtype).to(settings.device)
            sorted_PL = grouped_expert_ffn(
                [slots.experts[expert] for expert in experts],
                z_PL,
                counts,
                activation=settings.activation,
                numerics=settings.numerics,
            ).cpu()
            y_PL = torch.empty_like(sorted_PL)
            y_PL.index_copy_(0, torch.from_numpy(order_P), sorted_PL)
        return y_PL, len(experts)

    def _holds(self, layer: int, expert: int) -> bool:
        slots = self._layers.get(layer)
        return slots is not None and expert in slots.experts

    def _slots(self, placed: LayerPlacement) -> _LayerSlots:
        num_experts = len(placed.holders)
        slots = self._layers.get(placed.layer)
        if slots is None:
            slots = _LayerSlots(experts={}, is_held_E=np.zeros(num_experts, np.bool_), epochs=set())
            self._layers[placed.layer] = slots
        if slots.is_held_E.size != num_experts:
            raise PlacementError(
                f"layer {placed.layer} has {slots.is_held_E.size} experts, "
                f"the placement places {num_experts}"
            )
        return slots

    def _check_budget(self, num_missing: int, expert_bytes: int) -> None:
        budget = self._settings.memory_bytes
        needed = self.num_bytes + num_missing * expert_bytes
        num_experts = self.num_experts + num_missing
        if budget is not None and needed > budget:
            raise DeviceTooSmallError(
                f"{self._worker} needs {needed} bytes for {num_experts} experts, "
                f"its budget is {budget} bytes; raise expert_pool.memory_bytes or add workers "
                "(expert_pool.num_workers)"
            )


def _run_starts(sorted_P: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Return where each run of equal values begins."""
    is_start = np.ones(sorted_P.size, np.bool_)
    np.not_equal(sorted_P[1:], sorted_P[:-1], is_start[1:])
    return is_start.nonzero()[0]


def _shorten(experts: tuple[int, ...]) -> str:
    shown = ", ".join(str(expert) for expert in experts[:10])
    return shown if len(experts) <= 10 else f"{shown}, ..."
