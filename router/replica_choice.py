"""Which of several copies of an expert serves a pick: per step, by the load of that step.

The picks of a layer are split over copies so that the most loaded worker is done as early as it can
be. An expert with copies ties its workers together, and load flows along these ties. Levelling the
workers of one expert after the other (Gauss-Seidel) minimises the sum of squares of the loads over
all splits; the same split has the lowest maximum, because the loads that splits can reach form a
base polytope (Fujishige, "Lexicographically optimal base of a polymatroid with respect to a weight
vector", 1980). A few sweeps come within some per mille of it; the exact linear program is the twin
(`benchmarks/placement/exact_split.py`).

Pure: the same arguments give the same choice, so that a step can be replayed.

Shapes: P picks, E logical experts, R most copies of an expert, W workers, M experts with copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from router.compiled import compiled
from router.copies import Copies

MAX_SWEEPS = 12
TOLERANCE = 1e-3
"""Sweeps end when one moved less than this part of all load."""


@compiled
def split_load(
    load_E: NDArray[np.float64],
    copies: Copies,
    load_W: NDArray[np.float64],
    part_ER: NDArray[np.float64],
) -> None:
    """Split every expert's load over its copies.

    Args:
        load_E: Load of each expert, at least 0. Experts without a copy are left out.
        copies: The layer's copies.
        load_W: In: what workers have to do anyway, at least 0. Out: all that they have to do.
        part_ER: Out: load of each copy of the experts with several; the rest is not touched.
    """
    total = 0.0
    for expert in range(load_E.size):
        total += load_E[expert]
        if copies.num_E[expert] == 1:
            load_W[copies.worker_ER[expert, 0]] += load_E[expert]
    for expert in copies.replicated_M:
        part = load_E[expert] / copies.num_E[expert]
        for copy in range(copies.num_E[expert]):
            part_ER[expert, copy] = part
            load_W[copies.worker_ER[expert, copy]] += part
    num = copies.replicated_M.size
    for sweep in range(MAX_SWEEPS):
        moved = 0.0
        for i in range(num):
            # In both directions, so that load gets along a chain of copies in one sweep.
            expert = copies.replicated_M[i if sweep % 2 == 0 else num - 1 - i]
            if copies.num_E[expert] == 2:
                moved += _level_pair(expert, copies, load_W, part_ER)
            else:
                moved += _level_many(expert, load_E[expert], copies, load_W, part_ER)
        if moved <= TOLERANCE * total:
            break


@compiled
def _level_pair(
    expert: int, copies: Copies, load_W: NDArray[np.float64], part_ER: NDArray[np.float64]
) -> float:
    """Level the times of the two workers of an expert, as far as its load goes."""
    first, second = copies.worker_ER[expert, 0], copies.worker_ER[expert, 1]
    s_first, s_second = copies.seconds_W[first], copies.seconds_W[second]
    to_first = (load_W[second] * s_second - load_W[first] * s_first) / (s_first + s_second)
    to_first = min(max(to_first, -part_ER[expert, 0]), part_ER[expert, 1])
    part_ER[expert, 0] += to_first
    part_ER[expert, 1] -= to_first
    load_W[first] += to_first
    load_W[second] -= to_first
    return float(abs(to_first))


@compiled
def _level_many(
    expert: int,
    load: float,
    copies: Copies,
    load_W: NDArray[np.float64],
    part_ER: NDArray[np.float64],
) -> float:
    """Level the times of all workers of an expert, as far as its load goes: water filling."""
    num_copies = copies.num_E[expert]
    for copy in range(num_copies):
        load_W[copies.worker_ER[expert, copy]] -= part_ER[expert, copy]
    # Workers above the level get nothing. Each pass leaves out at least one, or it is the last.
    level = np.inf
    for _ in range(num_copies):
        filled, speed = load, 0.0
        for copy in range(num_copies):
            worker = copies.worker_ER[expert, copy]
            if load_W[worker] * copies.seconds_W[worker] < level:
                filled += load_W[worker]
                speed += 1.0 / copies.seconds_W[worker]
        if speed == 0.0:
            break
        level = filled / speed
    moved = 0.0
    for copy in range(num_copies):
        worker = copies.worker_ER[expert, copy]
        part = max(0.0, level / copies.seconds_W[worker] - load_W[worker])
        moved += abs(part - part_ER[expert, copy])
        part_ER[expert, copy] = part
        load_W[worker] += part
    return moved / 2


@compiled
def split_picks(
    load_E: NDArray[np.float64],
    copies: Copies,
    load_W: NDArray[np.float64],
    part_ER: NDArray[np.float64],
) -> None:
    """Split every expert's picks over its copies, as `split_load`, in whole picks.

    What rounding down leaves over goes to the copy whose worker is done first.
    """
    split_load(load_E, copies, load_W, part_ER)
    for expert in copies.replicated_M:
        for copy in range(copies.num_E[expert]):
            whole = np.floor(part_ER[expert, copy])
            load_W[copies.worker_ER[expert, copy]] -= part_ER[expert, copy] - whole
            part_ER[expert, copy] = whole
    for expert in copies.replicated_M:
        left = load_E[expert]
        for copy in range(copies.num_E[expert]):
            left -= part_ER[expert, copy]
        for _ in range(int(left)):
            best, least = 0, np.inf
            for copy in range(copies.num_E[expert]):
                worker = copies.worker_ER[expert, copy]
                time = (load_W[worker] + 1.0) * copies.seconds_W[worker]
                if time < least:
                    best, least = copy, time
            part_ER[expert, best] += 1.0
            load_W[copies.worker_ER[expert, best]] += 1.0


@compiled
def choose_workers(
    experts_P: NDArray[np.uint32],
    copies: Copies,
    load_W: NDArray[np.float64],
    worker_P: NDArray[np.int64],
) -> None:
    """Choose the worker of every pick of a layer's dispatch.

    Args:
        experts_P: Logical experts, all below E.
        copies: The layer's copies.
        load_W: In: what workers have to do anyway, in picks; zeros if nothing is known. Out: with
            these picks.
        worker_P: Out: worker index of each pick; `NOBODY` where the expert has no copy.
    """
    num_experts, most = copies.worker_ER.shape
    load_E = np.zeros(num_experts)
    for expert in experts_P:
        load_E[expert] += 1.0
    part_ER = np.empty((num_experts, most))
    split_picks(load_E, copies, load_W, part_ER)
    # Worker of the next pick of each expert, picks until it changes, and the copy it is.
    worker_E = copies.worker_ER[:, 0].copy()
    left_E = np.full(num_experts, experts_P.size + 1, np.int64)
    copy_E = np.zeros(num_experts, np.int64)
    for expert in copies.replicated_M:
        left_E[expert] = int(part_ER[expert, 0]) + 1
    for pick in range(experts_P.size):
        expert = experts_P[pick]
        left_E[expert] -= 1
        while left_E[expert] == 0:
            copy_E[expert] += 1
            worker_E[expert] = copies.worker_ER[expert, copy_E[expert]]
            left_E[expert] = int(part_ER[expert, copy_E[expert]])
        worker_P[pick] = worker_E[expert]


def warm_up() -> None:
    """Compile, or load what was compiled before, so that no step waits for it."""
    copies = Copies(
        worker_ER=np.array([[0, 1, 2], [0, 1, -1], [0, -1, -1]]),
        num_E=np.array([3, 2, 1]),
        replicated_M=np.array([0, 1]),
        seconds_W=np.ones(3),
    )
    choose_workers(np.arange(3, dtype=np.uint32), copies, np.zeros(3), np.empty(3, np.int64))
