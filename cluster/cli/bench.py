"""`latentmesh bench placement`: how good placements of experts are, beside what others do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.placement.case import Case
from benchmarks.placement.plot import draw_plot
from benchmarks.placement.policies import FACTORIES
from benchmarks.placement.report import CaseReport, as_json, make_table, write_report
from benchmarks.placement.run import check_policies, run_case
from benchmarks.placement.traces import KINDS, TraceSpec, make_trace, read_trace
from configs.errors import ConfigError


class Shape(StrEnum):
    """Shapes of known models."""

    K3 = "k3"
    R1 = "r1"
    QWEN = "qwen"


SIZES = {Shape.K3: (92, 896, 16, 17_547_264), Shape.R1: (58, 256, 8, 88_080_384)}
SIZES[Shape.QWEN] = (94, 128, 8, 88_080_384)
"""Layers, experts, picks per token, bytes of an expert."""
DEFAULT_POLICIES = "none,eplb,eplb_256,flash_lb,ours,ours_b1,ours_b8"


class Benchmark(StrEnum):
    """What can be measured."""

    PLACEMENT = "placement"


def bench(  # noqa: PLR0913 - one option each
    what: Annotated[Benchmark, typer.Argument(help="What to measure.")],
    *,
    trace: Annotated[
        Path | None, typer.Option(help="A .npy file [steps, layers, experts].")
    ] = None,
    kind: Annotated[
        str, typer.Option(help=f"Made traces: {', '.join(KINDS)}; or several.")
    ] = "mix",
    shape: Annotated[Shape, typer.Option(help="Layers, experts and bytes of a model.")] = Shape.R1,
    layers: Annotated[int | None, typer.Option(help="Layers of a made trace.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts of a made trace.")] = None,
    workers: Annotated[str, typer.Option(help="Expert workers; or several numbers.")] = "64",
    redundant: Annotated[
        int | None, typer.Option(help="Slots per layer beyond the experts; else one per worker.")
    ] = None,
    expert_bytes: Annotated[int | None, typer.Option(help="What a move costs.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of a made trace; by the rule 8192.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Of a made trace.")] = 0,
    policies: Annotated[str, typer.Option(help=", ".join(FACTORIES))] = DEFAULT_POLICIES,
    floors: Annotated[int, typer.Option(min=0, help="Steps to solve the exact program for.")] = 64,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture (.png).")] = None,
    results: Annotated[Path | None, typer.Option(help="Folder for a result file.")] = None,
) -> None:
    """Compare ways to place experts by the rule of the MoE load balancing competition."""
    names = [name.strip() for name in policies.split(",") if name.strip()]
    check_policies(names)
    num_layers, num_experts, top_k, default_bytes = SIZES[shape]
    wanted = (num_layers if layers is None else layers, num_experts if experts is None else experts)
    fleet_sizes = _numbers(workers)
    reports = []
    for one in [trace] if trace is not None else kind.split(","):
        with _progress() as progress:
            if isinstance(one, Path):
                loads: NDArray[np.number] = read_trace(one)
            else:
                spec = TraceSpec(
                    one.strip(), steps, *wanted, min(top_k, max(1, wanted[1])), seed=seed
                )
                task = progress.add_task(f"making {one}", total=steps)
                loads = make_trace(spec, lambda _, task=task: progress.advance(task))  # type: ignore[misc]  # bound now
            for num in fleet_sizes:
                case = Case(
                    loads.shape[1],
                    loads.shape[2],
                    num,
                    num if redundant is None else redundant,
                    default_bytes if expert_bytes is None else expert_bytes,
                )
                reports.append(_run(progress, case, loads, names, str(one), seed, floors))
                if results is not None:
                    # After each, so that what was measured is kept when the rest is stopped.
                    write_report(reports, f"latentmesh {' '.join(sys.argv[1:])}", results)
    _show(reports, as_json_=as_json_, plot=plot)


def _run(
    progress: Progress,
    case: Case,
    loads: NDArray[np.number],
    names: Sequence[str],
    trace: str,
    seed: int,
    floors: int,
) -> CaseReport:
    tasks = {name: progress.add_task(name, total=len(loads)) for name in names}
    report = run_case(
        case,
        loads,
        names,
        trace=trace,
        seed=seed,
        num_floors=floors,
        on_steps=lambda name, num: progress.advance(tasks[name], num),
    )
    for task in tasks.values():
        progress.remove_task(task)
    return report


def _show(reports: Sequence[CaseReport], *, as_json_: bool, plot: Path | None) -> None:
    if as_json_:
        typer.echo(json.dumps(as_json(reports), indent=2))
    else:
        console = Console()
        for report in reports:
            console.print(make_table(report))
    if plot is not None:
        draw_plot(reports, plot)


@contextmanager
def _progress() -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        yield progress


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise ConfigError(f"'{text}' is no number of workers, such as 64 or 32,64") from exc
