"""What `context_length.py` found: the numbers, their table, their plot and their files."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import matplotlib as mpl
import psutil
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.machine import hardware_name

MIB = 1 << 20
SLOPE_FROM = 16_384
"""Below it the part of an MLA layer that does not grow hides how the rest does."""


@dataclass(frozen=True, slots=True)
class ContextRow:
    """One context length. Times are medians, microseconds per token and layer."""

    context: int
    prefill_kda_us: float
    prefill_mla_us: float
    decode_kda_us: float
    decode_mla_us: float
    decode_mla_p90_us: float
    cache_bytes: int
    """MLA cache of the request, all layers: what a decode step has to read at least."""
    roofline_us: float
    """Reading one layer's cache at the measured bandwidth."""
    prefill_extra_bytes: int
    """Most resident memory of the prefill up to here, less the process and the cache in use."""
    decode_extra_bytes: int


@dataclass(frozen=True, slots=True)
class ContextReport:
    """A whole run."""

    rows: tuple[ContextRow, ...]
    chunk_ends: tuple[int, ...]
    chunk_kda_us: tuple[float, ...]
    """Of every chunk of the prompt, microseconds per token and layer."""
    chunk_mla_us: tuple[float, ...]
    chunk_tokens: int
    cache_bytes_per_token: int
    num_heads: int
    """Of the MLA layer."""
    bandwidth: float
    """Bytes per second."""
    seconds: float
    """Prompt and decode steps together."""

    def growth(self, field: str) -> float:
        """Return the power of the context by which a time grows from `SLOPE_FROM` to the end.

        1 is linear, 0 is flat; not a number where only one context is that long.
        """
        rows = [row for row in self.rows if row.context >= SLOPE_FROM]
        if len(rows) < 2:
            return math.nan
        first, last = rows[0], rows[-1]
        ratio = float(getattr(last, field)) / float(getattr(first, field))
        return math.log(ratio) / math.log(last.context / first.context)

    def marginal_bandwidth(self) -> float:
        """Bytes per second of the cache's growth between the first and last context, in decode."""
        first, last = self.rows[0], self.rows[-1]
        return (last.cache_bytes - first.cache_bytes) / (
            (last.decode_mla_us - first.decode_mla_us) * 1e-6
        )


def format_table(report: ContextReport) -> str:
    """Return a Markdown table and a few lines that say what it shows."""
    columns = (
        "context",
        "prefill KDA us",
        "prefill MLA us",
        "decode KDA us",
        "decode MLA us",
        "p90",
        "cache read MiB",
        "at read bandwidth us",
        "prefill memory beyond cache MiB",
        "decode memory beyond cache MiB",
    )
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in report.rows:
        cells = (
            f"{row.context}",
            f"{row.prefill_kda_us:.1f}",
            f"{row.prefill_mla_us:.1f}",
            f"{row.decode_kda_us:.0f}",
            f"{row.decode_mla_us:.0f}",
            f"{row.decode_mla_p90_us:.0f}",
            f"{row.cache_bytes / MIB:.1f}",
            f"{row.roofline_us:.0f}",
            f"{row.prefill_extra_bytes / MIB:.1f}",
            f"{row.decode_extra_bytes / MIB:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_conclusions(report)])


def _conclusions(report: ContextReport) -> list[str]:
    fields = (
        ("prefill KDA", "prefill_kda_us"),
        ("prefill MLA", "prefill_mla_us"),
        ("decode KDA", "decode_kda_us"),
        ("decode MLA", "decode_mla_us"),
    )
    growth = ", ".join(f"{name} {report.growth(field):.2f}" for name, field in fields)
    slope = f"Power of the context by which a time grows, from {SLOPE_FROM} on: {growth}."
    read = f"Decode reads what the cache grows by at {report.marginal_bandwidth() / 1e9:.1f} GB/s"
    machine = f"this machine reads {report.bandwidth / 1e9:.1f} GB/s with one thread."
    return [slope, f"{read}; {machine}", f"Whole run: {report.seconds:.0f} s."]


def draw_plot(report: ContextReport, path: Path) -> None:
    """Write the plot: microseconds per token and layer against the context, log-log."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    prefill, decode = figure.subplots(1, 2)
    contexts = [row.context for row in report.rows]
    prefill.plot(report.chunk_ends, report.chunk_mla_us, ".", color="tab:red", alpha=0.2, ms=4)
    prefill.plot(report.chunk_ends, report.chunk_kda_us, ".", color="tab:blue", alpha=0.2, ms=4)
    _draw_lines(
        prefill,
        contexts,
        mla=[row.prefill_mla_us for row in report.rows],
        kda=[row.prefill_kda_us for row in report.rows],
    )
    prefill.set_title(f"prefill, chunks of {report.chunk_tokens}")
    _draw_lines(
        decode,
        contexts,
        mla=[row.decode_mla_us for row in report.rows],
        kda=[row.decode_kda_us for row in report.rows],
    )
    decode.plot(
        contexts,
        [row.roofline_us for row in report.rows],
        ":",
        color="black",
        label=f"cache at {report.bandwidth / 1e9:.1f} GB/s",
    )
    decode.set_title("decode, one token")
    for axes in (prefill, decode):
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", xticks=contexts)
        axes.set_xticklabels([_short(context) for context in contexts])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    prefill.set_ylabel("us per token and layer")
    figure.suptitle("Time of attention layers by context length")
    figure.savefig(path, dpi=120)


def _draw_lines(
    axes: Axes, contexts: Sequence[int], *, mla: Sequence[float], kda: Sequence[float]
) -> None:
    axes.plot(contexts, mla, "o-", color="tab:red", label="MLA layer")
    axes.plot(contexts, kda, "s-", color="tab:blue", label="KDA layer")
    linear = [mla[-1] * context / contexts[-1] for context in contexts]
    axes.plot(contexts, linear, "--", color="gray", label="linear in the context")


def _short(context: int) -> str:
    return f"{context // 1024}k" if context % 1024 == 0 else str(context)


def write_all(report: ContextReport, command: str, folder: Path) -> tuple[Path, ...]:
    """Write report, numbers and plot of today side by side and return their paths."""
    day = datetime.now(UTC).strftime("%Y%m%d")
    stem = folder / f"context_length_{hardware_name()}_{day}"
    text, numbers, plot = (stem.with_suffix(suffix) for suffix in (".md", ".json", ".png"))
    load = os.getloadavg()
    text.write_text(
        f"# Cost of the context length\n\n"
        f"Machine: {hardware_name()}, {psutil.virtual_memory().total >> 30} GiB.\n"
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"matplotlib {mpl.__version__}; one thread, float32, fast numerics.\n"
        f"Load of the machine over the last minute (1 and 5): {load[0]:.1f} and {load[1]:.1f}.\n"
        f"Command: `{command}`\n\n{format_table(report)}\n\n![plot]({plot.name})\n\n"
        f"Three KDA layers and one MLA layer of hidden size 64 with "
        f"{report.cache_bytes_per_token} bytes of cache per token, random weights, one request. "
        f"Times are of whole attention layers: projections, cache or state, attention, output; per "
        f"token and layer. Prefill: chunks of {report.chunk_tokens}, the last sixteenth before "
        f"the context. Decode: alone in its batch, at that context. `cache read` is what a decode "
        f"step has to read at least. Memory: the most that was resident, less what was before the "
        f"prompt and less the cache in use.\n\n"
        f"Decode is far from the read bandwidth because each cache tile is copied out of its "
        f"blocks and then read by two products of {report.num_heads} rows each: with so few heads "
        f"a product costs more than its reading.\n"
    )
    numbers.write_text(json.dumps(asdict(report), indent=1) + "\n")
    draw_plot(report, plot)
    return text, numbers, plot
