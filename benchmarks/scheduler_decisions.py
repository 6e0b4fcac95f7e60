"""How long the engine's scheduler thinks with 10,000 queued and 1,000 running requests.

No model runs: requests, queue, pools, prefix index and scheduler are the engine's own, and every
planned token is taken as computed. What is timed is what precedes each step: building the frozen
state, and `schedule`. Giving and taking memory as planned is not timed. See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import torch

from actors.engine.admission import EngineLimits, SnapshotLimits
from actors.engine.request import EngineRequest
from actors.engine.request_memory import RequestMemory
from actors.engine.request_table import RequestTable
from actors.engine.scheduler import Chunk, StepPlan, schedule
from actors.request_channel import Sampling, Submit
from benchmarks.machine import hardware_name
from configs.ids import RequestId
from configs.numerics import EndReason, FinishReason
from model.cache import ModelMemory

NUM_QUEUED = 10_000
NUM_RUNNING = 1_000
BLOCK_TOKENS = 16
MAX_STEP_TOKENS = 2_048
MAX_FILL_STEPS = 2_000
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 256
AMPLE_BLOCKS_EACH = 160


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load."""

    name: str
    min_output: int
    max_output: int
    blocks_each: int
    """Cache blocks per running request."""


SCENARIOS = (
    Scenario("all decode, no slot free", 1 << 11, 1 << 11, AMPLE_BLOCKS_EACH),
    Scenario("some end, others start", 32, 256, AMPLE_BLOCKS_EACH),
    Scenario("too few blocks, some give way", 400, 600, 14),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. Times in microseconds."""

    scenario: str
    running: float
    """Median of the requests that ran."""
    queued: float
    admitted: float
    """Per step, on average."""
    preempted: float
    state_median: float
    state_p99: float
    schedule_median: float
    schedule_p99: float
    both_median: float
    both_p99: float
    both_worst: float
    """Mostly a full collection of garbage, which looks at the tokens of every queued prompt."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One step."""

    num_running: int
    num_queued: int
    plan: StepPlan
    state_s: float
    schedule_s: float


class Bench:
    """A request table that is kept full."""

    def __init__(self, scenario: Scenario) -> None:
        """Fill the queue, and admit until as many run as ever will."""
        num_blocks = NUM_RUNNING * scenario.blocks_each
        limits = EngineLimits(
            vocab_size=1_000,
            context_tokens=1 << 16,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            num_state_slots=NUM_RUNNING,
            max_step_tokens=MAX_STEP_TOKENS,
            max_queued_requests=1 << 20,
            snapshots=SnapshotLimits(max_bytes=1 << 22),
        )
        memory = ModelMemory(
            kv_MNPC=torch.zeros(1, num_blocks, BLOCK_TOKENS, 1),
            state_ASHDD=torch.zeros(1, NUM_RUNNING + 4, 1, 4, 4),
            conv_ASJ3HD=torch.zeros(1, NUM_RUNNING + 4, 3, 12),
        )
        self._scenario = scenario
        self._memory = RequestMemory(memory, limits, model="", clock=time.monotonic)
        self._table = RequestTable(memory, self._memory, limits)
        self._random = random.Random(0)  # noqa: S311 - lengths, no secrets
        self._numbers = itertools.count()
        self._step = 0
        self._starved_steps = 0

    @property
    def num_running(self) -> int:
        """Requests that own memory."""
        return len(self._table.running)

    def fill(self) -> None:
        """Step until `NUM_RUNNING` requests run, or memory holds no more."""
        for _ in range(MAX_FILL_STEPS):
            plan = self.step().plan
            if self.num_running >= NUM_RUNNING or plan.preempted:
                return
        raise SystemExit(f"only {self.num_running} requests run after {MAX_FILL_STEPS} steps")

    def step(self) -> Decision:
        """Refill the queue, plan a step, and act as if it had been computed."""
        table = self._table
        while len(table.queued) < NUM_QUEUED:
            table.submit(self._make_submit(), time.monotonic())
        num_running, num_queued = len(table.running), len(table.queued)
        started = time.perf_counter()
        state = table.scheduler_state(
            (), max_logit_rows=8192, step=self._step, starved_steps=self._starved_steps
        )
        built = time.perf_counter()
        plan = schedule(state)
        planned = time.perf_counter()
        self._apply(plan)
        return Decision(num_running, num_queued, plan, built - started, planned - built)

    def _make_submit(self) -> Submit:
        draw = self._random
        num_prompt = draw.randint(SHORTEST_PROMPT, LONGEST_PROMPT)
        max_tokens = draw.randint(self._scenario.min_output, self._scenario.max_output)
        return Submit(
            request_id=RequestId(f"r{next(self._numbers)}"),
            attempt=0,
            token_ids=draw.choices(range(1_000), k=num_prompt),
            max_tokens=max_tokens,
            sampling=Sampling(),
            stop_token_ids=[],
            credit_tokens=max_tokens,
            priority=draw.randint(-2, 2),
        )

    def _apply(self, plan: StepPlan) -> None:
        table = self._table
        self._step += 1
        self._starved_steps = self._starved_steps + 1 if plan.is_prefill_starved else 0
        table.preempt(plan)
        for chunk in plan.decode:
            table.grow(table.running[chunk.key])
        table.admit(plan, time.monotonic(), self._step)
        for chunk in (*plan.decode, *plan.prefill):
            request = table.running.get(chunk.key)
            if request is not None and request.computed == chunk.position:
                self._compute(request, chunk)
        table.take_ended()

    def _compute(self, request: EngineRequest, chunk: Chunk) -> None:
        now = time.monotonic()
        request.take_progress(chunk.num_tokens, self._step)
        if chunk.save_at is not None and request.slot is not None:
            self._memory.save_prefix(request, chunk.save_at, request.slot)
        if request.needs_token:
            request.append_token(self._random.randrange(1_000), now)
        self._table.update(request)
        if request.find_finish() is not None:
            self._table.end(request, EndReason.FINISHED, now, finish=FinishReason.LENGTH)


def measure(scenario: Scenario, num_steps: int) -> Result:
    """Measure `num_steps` decisions after a third as many that are not counted."""
    bench = Bench(scenario)
    bench.fill()
    for _ in range(num_steps // 3):
        bench.step()
    gc.collect()
    gc.freeze()  # As a worker does after loading.
    decisions = [bench.step() for _ in range(num_steps)]
    state_us = [one.state_s * 1e6 for one in decisions]
    schedule_us = [one.schedule_s * 1e6 for one in decisions]
    both_us = np.add(state_us, schedule_us).tolist()
    return Result(
        scenario=scenario.name,
        running=statistics.median(one.num_running for one in decisions),
        queued=statistics.median(one.num_queued for one in decisions),
        admitted=statistics.fmean(len(one.plan.admitted) for one in decisions),
        preempted=statistics.fmean(len(one.plan.preempted) for one in decisions),
        state_median=statistics.median(state_us),
        state_p99=_p99(state_us),
        schedule_median=statistics.median(schedule_us),
        schedule_p99=_p99(schedule_us),
        both_median=statistics.median(both_us),
        both_p99=_p99(both_us),
        both_worst=max(both_us),
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def format_table(results: Sequence[Result]) -> str:
    """Return a Markdown table."""
    columns = (
        "load",
        "running",
        "queued",
        "admitted per step",
        "preempted per step",
        "state us",
        "p99",
        "schedule us",
        "p99",
        "both us",
        "p99",
        "worst",
    )
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for r in results:
        cells = (
            r.scenario,
            *(f"{value:.0f}" for value in (r.running, r.queued)),
            *(f"{value:.1f}" for value in (r.admitted, r.preempted)),
            *(f"{value:.0f}" for value in (r.state_median, r.state_p99)),
            *(f"{value:.0f}" for value in (r.schedule_median, r.schedule_p99)),
            *(f"{value:.0f}" for value in (r.both_median, r.both_p99, r.both_worst)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_report(results: Sequence[Result], command: str, folder: Path) -> Path:
    """Write the result file of today and return its path."""
    day = datetime.now(UTC).strftime("%Y%m%d")
    path = folder / f"scheduler_decisions_{hardware_name()}_{day}.md"
    load = os.getloadavg()
    path.write_text(
        f"# Time of a scheduler decision\n\n"
        f"Machine: {hardware_name()}, {psutil.virtual_memory().total >> 30} GiB.\n"
        f"Versions: Python {platform.python_version()}, numpy {np.__version__}.\n"
        f"Load of the machine over the last minute (1 and 5): {load[0]:.1f} and {load[1]:.1f}.\n"
        f"Command: `{command}`\n\n{format_table(results)}\n\n"
        f"State: the frozen state from the engine's tables, the prefix lookups of the queue's head "
        f"included. Schedule: the plan from it. Prompts of {SHORTEST_PROMPT} to {LONGEST_PROMPT} "
        f"tokens, {MAX_STEP_TOKENS} tokens per step, blocks of {BLOCK_TOKENS}. No model runs, and "
        f"giving and taking memory as planned is not timed. The worst are full collections of "
        f"Python's garbage.\n"
    )
    return path


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="decisions per load")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--results", type=Path, help="folder for the result file; none: no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(scenario, options.steps) for scenario in SCENARIOS]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(format_table(results))
    if options.results is not None:
        command = "python -m benchmarks.scheduler_decisions " + " ".join(sys.argv[1:])
        print(write_report(results, command, options.results), file=sys.stderr)


if __name__ == "__main__":
    main()
