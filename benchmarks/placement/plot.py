"""Plots of the placement benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.placement.report import CaseReport

mpl.use("Agg")
COLOURS = {"A": "tab:gray", "B": "tab:blue"}


def draw_plot(reports: Sequence[CaseReport], path: Path) -> None:
    """Draw mean PAR and score of every policy, a row of the picture per trace."""
    figure = Figure(figsize=(11, 0.8 + 2.4 * len(reports)), layout="constrained")
    axes = figure.subplots(len(reports), 2, squeeze=False)
    for (par_axes, score_axes), report in zip(axes, reports, strict=True):
        rows = report.rows[::-1]
        names = [row.name for row in rows]
        colours = [COLOURS[row.track] for row in rows]
        par_axes.barh(names, [row.mean_par - 1 for row in rows], color=colours)
        par_axes.set_title(report.title, fontsize=8, loc="left")
        par_axes.set_xlabel("mean PAR - 1 (lower is better)")
        floors = [(row.floor_par, row.name) for row in rows if row.floor_par is not None]
        par_axes.plot([x - 1 for x, _ in floors], [y for _, y in floors], "k|", markersize=12)
        score_axes.barh(names, [row.score or 0 for row in rows], color=colours)
        score_axes.axvline(100, color="black", linewidth=0.8)
        score_axes.set_xlabel("score (EPLB every 1024 steps = 100)")
        score_axes.set_yticks([])
    figure.suptitle("Gray: fixed shares. Blue: split per step. |: exact program", fontsize=9)
    figure.savefig(path, dpi=120)
