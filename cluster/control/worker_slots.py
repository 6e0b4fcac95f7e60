"""From the bytes that expert workers may use to slots per layer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from configs.errors import PlacementError
from configs.ids import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What a plan may use of an expert worker."""

    worker: WorkerId
    budget_bytes: int
    """For weights of experts of all layers."""
    speed: float = 1.0
    """Picks per second, in units of an ordinary worker; more than 0."""
    domain: str = ""
    """Failure domain, e.g. the node; workers without one fail alone."""


def plan_slots(
    workers: Sequence[WorkerCapacity],
    *,
    expert_bytes: int,
    num_layers: int,
    num_experts: int,
    min_copies: int,
) -> NDArray[np.int64]:
    """Return how many copies each worker may hold in each layer, `[layers, workers]`.

    A worker's slots are spread evenly over the layers; the remainders go round, so that layers
    differ by one slot in sum. No worker gets more slots in a layer than there are experts.

    Raises:
        PlacementError: There is no worker, one is named twice or has no speed, `min_copies` need
            more workers than there are, or the budgets do not hold `min_copies` of every expert.
    """
    _check(workers, expert_bytes=expert_bytes, min_copies=min_copies)
    slots_LD = np.zeros((num_layers, len(workers)), np.int64)
    next_layer = 0
    for index, worker in enumerate(workers):
        num_slots = min(worker.budget_bytes // expert_bytes, num_layers * num_experts)
        each, left = divmod(num_slots, num_layers)
        slots_LD[:, index] = each
        slots_LD[(next_layer + np.arange(left)) % num_layers, index] += 1
        next_layer = (next_layer + left) % num_layers
    needed = num_experts * min_copies
    fewest = int(slots_LD.sum(axis=1).min())
    if fewest < needed:
        missing = (needed - fewest) * num_layers * expert_bytes
        raise PlacementError(
            f"the budgets of {len(workers)} expert workers hold {fewest} copies per layer, "
            f"{needed} are needed ({num_experts} experts, {min_copies} each); about "
            f"{missing:,} bytes are missing: raise the budgets or add workers"
        )
    return slots_LD


def _check(workers: Sequence[WorkerCapacity], *, expert_bytes: int, min_copies: int) -> None:
    names = [one.worker for one in workers]
    if not names:
        raise PlacementError("no expert worker to place experts on; at least 1 is needed")
    if len(set(names)) != len(names):
        raise PlacementError(f"expert workers are named twice: {names}")
    if expert_bytes < 1:
        raise PlacementError(f"an expert of {expert_bytes} bytes cannot be placed")
    if len(names) < min_copies:
        raise PlacementError(
            f"{min_copies} copies of every expert need {min_copies} expert workers, there are "
            f"{len(names)}; add workers or lower expert_pool.tolerate_worker_losses"
        )
    for one in workers:
        if not 0 < one.speed < float("inf"):
            raise PlacementError(f"{one.worker} has a speed of {one.speed}; it must be above 0")
