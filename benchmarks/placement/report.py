"""What policies came to: rows, a table, JSON, a result file."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numba
import numpy as np
import psutil
import scipy
from rich import box
from rich.table import Table

from benchmarks.machine import hardware_name
from benchmarks.placement.case import Case
from benchmarks.placement.simulate import Outcome


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy on one trace."""

    name: str
    track: str
    """A: fixed shares; B: the dispatcher splits each step."""
    num_choosers: int
    mean_par: float
    max_par: float
    moves: int
    moved_bytes: int
    planner_s_median: float
    planner_s_max: float
    score: float | None
    """100 x the time of EPLB over this one's; None where EPLB did not run."""
    split_us_median: float | None
    """One attention worker splits its picks of one layer; track B."""
    choice_us_median: float | None
    """The same, with the count before and the worker of every pick after it."""
    floor_par: float | None
    """Of the exact program on this policy's placements, at sampled steps."""
    sampled_par: float | None
    """Of the policy at the same steps."""


@dataclass(frozen=True, slots=True)
class CaseReport:
    """All policies on one trace."""

    trace: str
    num_steps: int
    seed: int
    case: Case
    rows: tuple[PolicyRow, ...]

    @property
    def title(self) -> str:
        """Shape and trace in a few words."""
        case = self.case
        return (
            f"{case.num_layers} x {case.num_experts} experts, {case.num_workers} workers, "
            f"{case.num_redundant} redundant slots, {self.trace}, {self.num_steps} steps"
        )


def make_row(
    outcome: Outcome,
    case: Case,
    *,
    reference_s: float | None,
    choice_us: tuple[float, float] | None,
    floors: Sequence[tuple[float, float]],
) -> PolicyRow:
    """Return the row of a policy.

    Args:
        outcome: What came of it.
        case: Its sizes.
        reference_s: Time of EPLB by the rule.
        choice_us: Median times of a split and of a whole choice.
        floors: (PAR of the exact program, PAR of the policy) at sampled steps.
    """
    plan_s = outcome.plan_s
    return PolicyRow(
        name=outcome.policy,
        track="B" if outcome.num_choosers else "A",
        num_choosers=outcome.num_choosers,
        mean_par=float(outcome.pars_TL.mean()),
        max_par=float(outcome.pars_TL.max()),
        moves=outcome.num_moves,
        moved_bytes=outcome.num_moves * case.expert_bytes,
        planner_s_median=statistics.median(plan_s) if plan_s else 0.0,
        planner_s_max=max(plan_s, default=0.0),
        score=None if reference_s is None else 100 * reference_s / outcome.model_s(case),
        split_us_median=None if choice_us is None else choice_us[0],
        choice_us_median=None if choice_us is None else choice_us[1],
        floor_par=float(np.mean([floor for floor, _ in floors])) if floors else None,
        sampled_par=float(np.mean([own for _, own in floors])) if floors else None,
    )


LEGEND = """\
PAR: load of the most loaded worker over the average; mean and max over steps and layers. Track A:
fixed shares; B: every step is split over the copies by attention workers (8 where it says so) that
see only their own picks. Score: 100 x time of EPLB with a window of 1024 steps, moves included,
over that of the policy. `oracle` sees the next window. Choice: of one attention worker for one
layer, the split alone and down to the worker of every pick. Exact / own: mean PAR at sampled steps
of the second half, of the exact program and of the policy on the policy's placement.
"""
NOT_ON_TERMINALS = ("track", "max")
"""There is room for 80 columns."""
HEADINGS = (
    "policy",
    "track",
    "mean PAR",
    "max PAR",
    "moves",
    "plan s",
    "max",
    "choice us",
    "exact / own",
    "score",
)


def cells(row: PolicyRow) -> tuple[str, ...]:
    """Return a row as text."""
    track = row.track if row.num_choosers <= 1 else f"{row.track} ({row.num_choosers})"
    return (
        row.name,
        track,
        f"{row.mean_par:.3f}",
        f"{row.max_par:.2f}",
        f"{row.moves:,}",
        f"{row.planner_s_median:.3f}",
        f"{row.planner_s_max:.2f}",
        ""
        if row.choice_us_median is None
        else f"{row.split_us_median:.0f}, {row.choice_us_median:.0f}",
        "" if row.floor_par is None else f"{row.floor_par:.3f} / {row.sampled_par:.3f}",
        "" if row.score is None else f"{row.score:.1f}",
    )


def make_table(report: CaseReport) -> Table:
    """Return a table for the terminal."""
    table = Table(
        title=report.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    shown = [at for at, heading in enumerate(HEADINGS) if heading not in NOT_ON_TERMINALS]
    for at in shown:
        table.add_column(HEADINGS[at], justify="right" if at else "left", no_wrap=True)
    for row in report.rows:
        texts = cells(row)
        table.add_row(*(texts[at] for at in shown))
    return table


def as_markdown(report: CaseReport) -> str:
    """Return the same for a file."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in report.rows]
    return f"## {report.title}\n\n" + "\n".join(lines) + "\n"


def as_json(reports: Sequence[CaseReport]) -> dict[str, Any]:
    """Return `policies` by name of the only trace, or `cases` of several."""
    cases = [
        {
            "trace": report.trace,
            "steps": report.num_steps,
            "seed": report.seed,
            "shape": asdict(report.case),
            "policies": {row.name: asdict(row) for row in report.rows},
        }
        for report in reports
    ]
    return cases[0] if len(cases) == 1 else {"cases": cases}


def write_report(reports: Sequence[CaseReport], command: str, folder: Path) -> Path:
    """Write the result file of today and return its path; a JSON file lies beside it."""
    now = datetime.now(UTC).strftime("%Y%m%d")
    case, steps = reports[0].case, reports[0].num_steps
    what = f"{case.num_layers}x{case.num_experts}_{steps}steps"
    path = folder / f"placement_{what}_{hardware_name()}_{now}.md"
    versions = (
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}, "
        f"scipy {scipy.__version__}"
    )
    machine = f"{hardware_name()}, {psutil.virtual_memory().total >> 30} GiB"
    heading = (
        f"# Placement of experts\n\nMachine: {machine}. Versions: {versions}. Commit: {_commit()}."
        f"\n\nCommand: `{command}`\n\n{LEGEND}"
    )
    parts = [heading, *(as_markdown(report) for report in reports)]
    path.write_text("\n".join(parts))
    path.with_suffix(".json").write_text(json.dumps(as_json(reports), indent=1) + "\n")
    return path


def _commit() -> str:
    """The commit that is checked out, or that there is none."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],  # noqa: S607 - whichever git is installed
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
        cwd=Path(__file__).parent,
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"
