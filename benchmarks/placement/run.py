"""Runs policies on traces.

Shapes: T steps, L layers, E logical experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.placement.case import Case
from benchmarks.placement.exact_split import exact_time
from benchmarks.placement.policies import FACTORIES, REFERENCE
from benchmarks.placement.report import CaseReport, make_row
from benchmarks.placement.simulate import Outcome, Simulation
from benchmarks.placement.traces import TraceSpec, make_trace
from cluster.control.layer_plan import find_copies
from configs.errors import ConfigError
from router.replica_choice import choose_workers, split_picks

NUM_TIMED_CHOICES = 64


def check_policies(names: Sequence[str]) -> None:
    """Refuse unknown policies.

    Raises:
        ConfigError: One is unknown, or none is named.
    """
    unknown = [name for name in names if name not in FACTORIES]
    if unknown or not names:
        raise ConfigError(
            f"policies {', '.join(unknown)} are not known; known: {', '.join(FACTORIES)}"
        )


def run_case(
    case: Case,
    load_TLE: NDArray[np.number],
    names: Sequence[str],
    *,
    trace: str,
    seed: int,
    num_floors: int = 0,
    on_steps: Callable[[str, int], None] = lambda _name, _num: None,
) -> CaseReport:
    """Run policies, each over the whole trace.

    Args:
        case: Sizes.
        load_TLE: The trace.
        names: Of policies (`policies.py`).
        trace: What it is called in reports.
        seed: Of the trace and the samples.
        num_floors: Steps at which the exact program is solved, of policies with a choice and EPLB.
        on_steps: Told the policy and how many more steps are done.

    Raises:
        ConfigError: The trace does not fit the case, or a policy is unknown.
    """
    check_policies(names)
    if load_TLE.shape[1:] != (case.num_layers, case.num_experts):
        raise ConfigError(
            f"the trace has {load_TLE.shape[1]} layers of {load_TLE.shape[2]} experts, "
            f"expected {case.num_layers} of {case.num_experts}"
        )
    _warm_up(names)
    sampled = _sample_steps(load_TLE, num_floors, seed)
    outcomes = []
    for name in names:
        simulation = Simulation(
            FACTORIES[name](case),
            case,
            load_TLE,
            sampled=sampled,
            on_steps=lambda num, name=name: on_steps(name, num),  # type: ignore[misc]  # bound now
        )
        outcomes.append(simulation.run())
    reference = next((one for one in outcomes if one.policy == REFERENCE), None)
    reference_s = None if reference is None else reference.model_s(case)
    rows = tuple(
        make_row(
            outcome,
            case,
            reference_s=reference_s,
            choice_us=_time_choices(outcome, case, load_TLE),
            floors=_floors(outcome, case, load_TLE),
        )
        for outcome in outcomes
    )
    return CaseReport(trace, len(load_TLE), seed, case, rows)


def _warm_up(names: Sequence[str]) -> None:
    """Compile what the policies need, so that the first plan is not charged for it."""
    case = Case(num_layers=1, num_experts=8, num_workers=4, num_redundant=4)
    load_TLE = make_trace(TraceSpec("plain", 96, 1, 8, 2, tokens=64))
    for name in names:
        Simulation(FACTORIES[name](case), case, load_TLE).run()


def _sample_steps(load_TLE: NDArray[np.number], num: int, seed: int) -> frozenset[tuple[int, int]]:
    """Return random (step, layer) of the second half, when policies have settled."""
    rng = np.random.default_rng(seed)
    num_steps, num_layers = load_TLE.shape[:2]
    steps = rng.integers(num_steps // 2, num_steps, num)
    return frozenset(zip(steps.tolist(), rng.integers(0, num_layers, num).tolist(), strict=True))


def _floors(
    outcome: Outcome, case: Case, load_TLE: NDArray[np.number]
) -> list[tuple[float, float]]:
    if outcome.num_choosers == 0 and outcome.policy != REFERENCE:
        return []
    floors = []
    for step, layer, slots_DS in outcome.samples:
        load_E = np.maximum(load_TLE[step, layer], 1).astype(np.float64)
        level = load_E.sum() / case.num_workers
        floors.append((exact_time(load_E, slots_DS) / level, float(outcome.pars_TL[step, layer])))
    return floors


def _time_choices(
    outcome: Outcome, case: Case, load_TLE: NDArray[np.number]
) -> tuple[float, float] | None:
    """Return median microseconds of a split and of a choice of one attention worker's picks."""
    if outcome.num_choosers == 0:
        return None
    times_us: list[tuple[float, float]] = []
    seconds_D = np.ones(case.num_workers)
    for number in range(NUM_TIMED_CHOICES):
        layer = number % case.num_layers
        slots_DS = outcome.last_slots_LDS[layer]
        copies = find_copies(slots_DS, seconds_D, case.num_experts)
        load_E = np.maximum(load_TLE[-1 - number % len(load_TLE), layer], 1).astype(np.int64)
        picks_P = np.repeat(np.arange(case.num_experts, dtype=np.uint32), load_E)
        picks_P = np.random.default_rng(number).permutation(picks_P)[:: outcome.num_choosers]
        picks_P = np.ascontiguousarray(picks_P)
        worker_P = np.empty(picks_P.size, np.int64)
        busy_W = np.zeros(case.num_workers)
        began = time.perf_counter()
        choose_workers(picks_P, copies, busy_W, worker_P)
        chosen = time.perf_counter()
        busy_W[:] = 0.0
        own_E = np.bincount(picks_P, minlength=case.num_experts).astype(np.float64)
        part_ER = np.empty(copies.worker_ER.shape)
        counted = time.perf_counter()
        split_picks(own_E, copies, busy_W, part_ER)
        times_us.append((1e6 * (time.perf_counter() - counted), 1e6 * (chosen - began)))
    split_us, choice_us = np.median(times_us[1:], axis=0).tolist()
    return split_us, choice_us
