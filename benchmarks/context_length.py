"""What a long context costs: time per token of KDA and MLA layers, and memory, up to 128k tokens.

One process, one thread, one request: its prompt in chunks, and a few decode steps at each context
length. The model is small and random; only its attention layers are timed (`long_context_model`).
The cache that a decode step has to read is set against the read bandwidth that the same run
measures. See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.context_report import ContextReport, ContextRow, draw_plot, format_table, write_all
from benchmarks.long_context_model import LongContextModel, StepTimes

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)
CHUNK_TOKENS = 512
NUM_DECODE_STEPS = 12
NUM_WARM_UP_STEPS = 3
BANDWIDTH_BYTES = 256 << 20
"""Far more than any cache of the processor."""
PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured when the request had `context` tokens."""

    context: int
    prefill: Sequence[StepTimes]
    """The last chunks before."""
    decode: Sequence[StepTimes]
    prefill_peak: int
    """Most resident bytes since the point before, decode left out."""
    decode_peak: int


def measure_read_bandwidth() -> float:
    """Bytes per second that one thread reads from memory, at best: summing, or copying."""
    source = torch.ones(BANDWIDTH_BYTES // 4)
    target = torch.zeros_like(source)
    fastest = 0.0
    for _ in range(8):
        started = time.perf_counter()
        source.sum()
        summed = time.perf_counter()
        target.copy_(source)
        copied = time.perf_counter()
        fastest = max(
            fastest, source.nbytes / (summed - started), 2 * source.nbytes / (copied - summed)
        )
    return fastest


def reset_peak() -> None:
    """Let the kernel count the peak of resident memory anew."""
    (PROC / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most resident bytes since `reset_peak`."""
    lines = (PROC / "status").read_text().splitlines()
    peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) * 1024


@contextmanager
def token_progress(total: int) -> Iterator[Progress]:
    """Show a bar of tokens while the block runs; silent when nobody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        progress.add_task("prompt tokens", total=total)
        yield progress


def measure_points(
    model: LongContextModel, contexts: Sequence[int]
) -> tuple[list[Point], list[tuple[int, StepTimes]]]:
    """Run the prompt up to the longest context, and decode at each.

    Returns:
        The points, and every chunk with the position of its end.
    """
    points: list[Point] = []
    chunks: list[tuple[int, StepTimes]] = []
    reset_peak()
    with token_progress(contexts[-1]) as progress:
        for position in range(0, contexts[-1], CHUNK_TOKENS):
            end = position + CHUNK_TOKENS
            chunks.append((end, model.prefill(position, CHUNK_TOKENS)))
            progress.advance(progress.task_ids[0], CHUNK_TOKENS)
            if end in contexts:
                prefill_peak = peak_bytes()
                reset_peak()
                steps = model.decode(end, NUM_DECODE_STEPS)[NUM_WARM_UP_STEPS:]
                num_last = max(1, end // CHUNK_TOKENS // 16)
                last = [times for _, times in chunks[-num_last:]]
                points.append(Point(end, last, steps, prefill_peak, peak_bytes()))
                reset_peak()
    return points, chunks


def summarise(point: Point, model: LongContextModel, base: int, bandwidth: float) -> ContextRow:
    """Medians per token and layer, and memory beyond the process and the cache in use."""
    num_kda, num_mla = len(model.dims.kda_layers), len(model.dims.mla_layers)
    cache_bytes = point.context * model.cache_bytes_per_token
    per_chunk = CHUNK_TOKENS / 1e6
    return ContextRow(
        context=point.context,
        prefill_kda_us=_median(t.kda_s for t in point.prefill) / num_kda / per_chunk,
        prefill_mla_us=_median(t.mla_s for t in point.prefill) / num_mla / per_chunk,
        decode_kda_us=_median(t.kda_s for t in point.decode) / num_kda * 1e6,
        decode_mla_us=_median(t.mla_s for t in point.decode) / num_mla * 1e6,
        decode_mla_p90_us=_p90([t.mla_s for t in point.decode]) / num_mla * 1e6,
        cache_bytes=cache_bytes,
        roofline_us=cache_bytes / num_mla / bandwidth * 1e6,
        prefill_extra_bytes=point.prefill_peak - base - cache_bytes,
        decode_extra_bytes=point.decode_peak - base - cache_bytes,
    )


def measure(max_tokens: int) -> ContextReport:
    """Measure contexts up to `max_tokens`."""
    contexts = [context for context in CONTEXTS if context < max_tokens] + [max_tokens]
    bandwidth = measure_read_bandwidth()
    model = LongContextModel(max_tokens + CHUNK_TOKENS)
    for position in range(0, 4 * CHUNK_TOKENS, CHUNK_TOKENS):
        model.prefill(position, CHUNK_TOKENS)
    model.decode(4 * CHUNK_TOKENS, NUM_WARM_UP_STEPS)
    model.forget()
    base = psutil.Process().memory_info().rss
    started = time.perf_counter()
    points, chunks = measure_points(model, contexts)
    num_kda, num_mla = len(model.dims.kda_layers), len(model.dims.mla_layers)
    return ContextReport(
        rows=tuple(summarise(point, model, base, bandwidth) for point in points),
        chunk_ends=tuple(end for end, _ in chunks),
        chunk_kda_us=tuple(t.kda_s / num_kda / CHUNK_TOKENS * 1e6 for _, t in chunks),
        chunk_mla_us=tuple(t.mla_s / num_mla / CHUNK_TOKENS * 1e6 for _, t in chunks),
        chunk_tokens=CHUNK_TOKENS,
        cache_bytes_per_token=model.cache_bytes_per_token,
        num_heads=model.dims.mla.num_heads,
        bandwidth=bandwidth,
        seconds=time.perf_counter() - started,
    )


def _median(values: Iterator[float]) -> float:
    return statistics.median(values)


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _num_tokens(text: str) -> int:
    value = int(text)
    if value < 4 * CHUNK_TOKENS or value % CHUNK_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{value} is no multiple of the chunk of {CHUNK_TOKENS} tokens from "
            f"{4 * CHUNK_TOKENS} on"
        )
    return value


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--max-tokens", type=_num_tokens, default=CONTEXTS[-1], help="longest context"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, help="write the plot there")
    parser.add_argument("--results", type=Path, help="folder for report, numbers and plot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure(options.max_tokens)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(format_table(report))
    if options.plot is not None:
        draw_plot(report, options.plot)
    if options.results is not None:
        command = "python -m benchmarks.context_length " + " ".join(sys.argv[1:])
        for path in write_all(report, command, options.results):
            print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
