"""The table of workers that `serve` and `status` print."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.table import Table

from cluster.api.topology import AttentionWorkerView, ExpertWorkerView, TopologyView

PIPE_WIDTH = 160
"""Columns where nobody watches: a table in a file must not depend on a guessed window."""
_MIB = 1 << 20


def make_worker_table(view: TopologyView) -> Table:
    """One row per worker, attention workers first."""
    table = Table(title=f"Workers, generation {view.membership_generation}", title_justify="left")
    for column in ("worker", "process", "memory", "holds", "load", "since the start"):
        is_number = column in ("process", "memory")
        table.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number or column == "worker",
        )
    for attention in view.attention_workers:
        table.add_row(attention.name, *_attention_cells(attention))
    table.add_section()
    for expert in view.expert_workers:
        table.add_row(expert.name, *_expert_cells(expert))
    return table


def make_console(file: IO[str]) -> Console:
    """Return a console that is wide enough for the table where `file` is no terminal."""
    width = None if file.isatty() else PIPE_WIDTH
    return Console(file=file, highlight=False, soft_wrap=True, width=width)


def is_gone(worker: AttentionWorkerView | ExpertWorkerView) -> bool:
    """Whether the cluster could not ask the worker."""
    return worker.pid == 0


def _attention_cells(worker: AttentionWorkerView) -> tuple[str, ...]:
    if is_gone(worker):
        return ("gone", "", "", "", "")
    blocks = f"{worker.used_blocks}/{worker.total_blocks} blocks"
    slots = f"{worker.used_slots}/{worker.total_slots} slots"
    num_tokens = worker.prompt_tokens + worker.output_tokens
    transports = "/".join(sorted(set(worker.transports)))
    return (
        str(worker.pid),
        _mib(worker.memory_bytes),
        f"{blocks}, {slots}",
        f"{worker.running_requests} running, {worker.queued_requests} queued",
        f"{num_tokens:,} tokens, {_mib(worker.wire_bytes_sent)} sent by {transports}",
    )


def _expert_cells(worker: ExpertWorkerView) -> tuple[str, ...]:
    if is_gone(worker):
        return ("gone", "", "", "", "")
    per_read = worker.pairs / worker.weight_reads if worker.weight_reads else 0.0
    return (
        str(worker.pid),
        _mib(worker.weight_bytes),
        f"{worker.num_expert_slots} experts",
        f"{worker.busy_s:.1f} s busy",
        f"{worker.pairs:,} pairs, {per_read:.2f} per weight read",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.1f} MiB"
