"""What recording and summing up the load of experts costs.

The recorder: CPU time per token with and without it, in pairs of requests to a small model in this
process, and the same at K3's shape for random choices. The window at
K3's size: memory, time to take a row in, time of two quantiles of all series. See
`benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import torch

from actors.load_recorder import LoadRecorder
from actors.request_channel import Sampling
from actors.single_process import SingleProcess, SingleProcessSettings
from benchmarks.machine import hardware_name
from cluster.control.load_window import LoadWindow
from configs.ids import WorkerId
from model.checkpoint import Checkpoint
from model.checkpoint_spec import CheckpointSpec
from model.checkpoint_writer import write_checkpoint

NUM_LAYERS, NUM_EXPERTS, TOP_K = 92, 896, 16
"""K3's MoE layers."""
NUM_ROWS = 128
NUM_PAIRS = 40
NUM_TOKENS = 64
STEP_TOKENS = (64, 512)
STUDENT_95 = 2.02
"""Of 40 pairs."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and how far it may be off, at 95 %."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        """Return both."""
        return f"{self.mean:.2f} +- {self.half_width:.2f}"


@dataclass(frozen=True, slots=True)
class Report:
    """All figures."""

    decoder_us_per_token: Interval
    """CPU time of a small decoder without the recorder."""
    recorder_us_per_token: Interval
    """What the recorder adds to it."""
    k3_step_us: dict[int, float]
    """Of a step at K3's shape, all layers, by its tokens."""
    recorder_bytes: int
    window_bytes: int
    window_row_us: float
    window_quantiles_s: float


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of paired differences, by Student's t."""
    error = statistics.stdev(values) / len(values) ** 0.5
    return Interval(statistics.mean(values), STUDENT_95 * error)


def run_request(process: SingleProcess, number: int) -> float:
    """Generate alone, a token per step: the recorder's worst case; CPU microseconds per token."""
    prompt = [(31 * number + i) % 256 for i in range(16)]
    began = time.process_time()
    process.generate(prompt, max_tokens=NUM_TOKENS, sampling=Sampling(), stop_token_ids=[])
    return 1e6 * (time.process_time() - began) / (len(prompt) + NUM_TOKENS)


def measure_decoder() -> tuple[Interval, Interval]:
    """Return CPU time per token without the recorder, and what it adds."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write_checkpoint(Path(folder) / "checkpoint", CheckpointSpec(), seed=0)
        checkpoint = Checkpoint.open(Path(folder) / "checkpoint")
        dims = checkpoint.dims
        recorder = LoadRecorder(
            layers=dims.moe_layers,
            num_experts=dims.moe.num_experts,
            num_rows=NUM_ROWS,
            max_step_tokens=512,
        )
        settings = SingleProcessSettings()
        plain = stack.enter_context(SingleProcess(checkpoint, settings))
        recorded = stack.enter_context(SingleProcess(checkpoint, settings, observer=recorder))
        without, added = [], []
        for pair in range(NUM_PAIRS + 1):
            # Which goes first alternates, so that a drift of the machine cancels out.
            order = (plain, recorded) if pair % 2 else (recorded, plain)
            times = {process: run_request(process, pair) for process in order}
            recorder.end_step()
            if pair:
                without.append(times[plain])
                added.append(times[recorded] - times[plain])
    return interval(without), interval(added)


def measure_k3_step(num_tokens: int) -> float:
    """Return CPU microseconds to count a step of all layers."""
    recorder = _k3_recorder()
    rng = np.random.default_rng(0)
    picks = [
        rng.integers(0, NUM_EXPERTS, num_tokens * TOP_K).astype(np.uint32)
        for _ in range(NUM_LAYERS)
    ]
    times = []
    for _ in range(50):
        began = time.process_time()
        for layer, picks_P in enumerate(picks):
            recorder.count(layer, picks_P)
        recorder.end_step()
        times.append(1e6 * (time.process_time() - began))
    return statistics.median(times)


def measure_window() -> tuple[int, float, float]:
    """Return bytes, microseconds to take a row in, seconds of two quantiles."""
    window = LoadWindow(layers=range(NUM_LAYERS), num_experts=NUM_EXPERTS, num_buckets=NUM_ROWS)
    rng = np.random.default_rng(0)
    row = rng.poisson(73, (1, NUM_LAYERS, NUM_EXPERTS)).astype(np.uint16)
    times = []
    for number in range(2 * NUM_ROWS):
        ended_at = np.array([0.1 * number + 0.05])
        began = time.perf_counter()
        window.add(WorkerId("attention-0"), row, ended_at, first_row=number)
        times.append(1e6 * (time.perf_counter() - began))
    began = time.perf_counter()
    window.quantiles([0.5, 0.99])
    return window.memory_bytes, statistics.median(times), time.perf_counter() - began


def _k3_recorder() -> LoadRecorder:
    return LoadRecorder(
        layers=range(NUM_LAYERS),
        num_experts=NUM_EXPERTS,
        num_rows=NUM_ROWS,
        max_step_tokens=max(STEP_TOKENS),
    )


def measure_all() -> Report:
    """Measure everything."""
    without, added = measure_decoder()
    window_bytes, row_us, quantiles_s = measure_window()
    return Report(
        decoder_us_per_token=without,
        recorder_us_per_token=added,
        k3_step_us={num: measure_k3_step(num) for num in STEP_TOKENS},
        recorder_bytes=_k3_recorder().memory_bytes,
        window_bytes=window_bytes,
        window_row_us=row_us,
        window_quantiles_s=quantiles_s,
    )


def format_report(report: Report) -> str:
    """Return a Markdown table."""
    share = 100 * report.recorder_us_per_token.mean / report.decoder_us_per_token.mean
    lines = [
        "| what | value |",
        "|---|---|",
        f"| small decoder, CPU us per token (mean +- 95 %) | {report.decoder_us_per_token} |",
        f"| recorder adds, CPU us per token | {report.recorder_us_per_token} ({share:.2f} %) |",
    ]
    lines += [
        f"| recorder, {num} tokens at K3's shape | {us:.0f} us, {us / num:.2f} per token |"
        for num, us in report.k3_step_us.items()
    ]
    series = NUM_LAYERS * NUM_EXPERTS
    lines += [
        f"| recorder, {NUM_ROWS} steps at K3's shape | {report.recorder_bytes / 1e6:.1f} MB |",
        f"| window, {NUM_ROWS} buckets at K3's shape | {report.window_bytes / 1e6:.1f} MB |",
        f"| window, taking a row in | {report.window_row_us:.0f} us |",
        f"| window, two quantiles of {series:,} series | {report.window_quantiles_s:.3f} s |",
    ]
    return "\n".join(lines)


def write_report(report: Report, command: str, folder: Path) -> Path:
    """Write the result file of today and return its path."""
    path = folder / f"load_recording_{hardware_name()}_{datetime.now(UTC).strftime('%Y%m%d')}.md"
    load = os.getloadavg()
    path.write_text(
        f"# Recording the load of experts\n\n"
        f"Machine: {hardware_name()}, {psutil.virtual_memory().total >> 30} GiB. Versions: Python "
        f"{platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}. "
        f"Load over the last minute: {load[0]:.1f}.\n\nCommand: `{command}`\n\n"
        f"{format_report(report)}\n\n"
        f"The recorder's cost on the decoder: {NUM_PAIRS} pairs of requests, "
        f"16 + {NUM_TOKENS} tokens each, alone in their batch, CPU time of the process.\n"
    )
    return path


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--results", type=Path, help="folder for the result file; none: no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure_all()
    print(json.dumps(asdict(report), indent=2) if options.json else format_report(report))
    if options.results is not None:
        command = "python -m benchmarks.load_recording " + " ".join(sys.argv[1:])
        print(write_report(report, command, options.results), file=sys.stderr)


if __name__ == "__main__":
    main()
