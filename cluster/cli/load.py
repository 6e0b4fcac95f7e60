"""`latentmesh load`: how much load single experts of a running cluster have had."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.api.load import LayerLoadView, LoadQuestion, LoadView
from cluster.api.topology import TopologyView
from cluster.cli.connection import connect
from cluster.cli.load_picture import draw_load
from cluster.cli.status import DEFAULT_DATA_DIR
from cluster.cli.worker_table import make_console
from cluster.data_folder import READY_FILE
from cluster.ready_record import read_record

Copies = dict[tuple[int, int], int]
"""Copies by layer and expert."""


def load(
    *,
    server: Annotated[
        str | None, typer.Option("--server", metavar="HOST:PORT", help="gRPC address.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Data folder of a cluster here, without --server.")
    ] = DEFAULT_DATA_DIR,
    quantile: Annotated[
        list[float] | None, typer.Option(help="Over the last steps, 0..1; may be repeated.")
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(help="Only this layer; may be repeated.")
    ] = None,
    hottest: Annotated[int, typer.Option(min=0, max=1024, help="Experts to list.")] = 10,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a heat map of layers and experts (.png).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show the load of layers and of the hottest experts, as picks per tenth of a second.

    Attention workers keep the picks of their last steps (`router.load_window_steps`).
    """
    address = server if server is not None else read_record(data_dir / READY_FILE).grpc
    question = LoadQuestion(
        quantiles=tuple(quantile) if quantile else LoadQuestion().quantiles,
        layers=tuple(layer) if layer else (),
        num_hottest=hottest,
        is_summary=picture is None and not as_json,
    )
    with connect(address) as client:
        view = client.load_quantiles(question)
        copies = count_copies(client.topology())
    if picture is not None and view.layers:
        draw_load(view, picture)
    if as_json:
        typer.echo(json.dumps(describe(view, copies, address), indent=2))
        return
    _print(view, copies, address)
    if picture is not None:
        typer.echo(f"{picture} is drawn" if view.layers else "no load: nothing is drawn")


def count_copies(view: TopologyView) -> Copies:
    """Return how many copies each expert has."""
    return {
        (placed.layer, expert): len(holders)
        for placed in view.layers
        for expert, holders in enumerate(placed.holders)
    }


def describe(view: LoadView, copies: Copies, address: str) -> dict[str, Any]:
    """Return what `load --json` prints."""
    return {
        "server": address,
        "quantiles": list(view.quantiles),
        "num_buckets": view.num_buckets,
        "bucket_s": view.bucket_s,
        "span_s": view.span_s,
        "workers": list(view.workers),
        "silent_workers": list(view.silent_workers),
        "layers": [_describe_layer(one) for one in view.layers],
        "hottest": [
            {
                "layer": one.layer,
                "expert": one.expert,
                "picks": list(one.picks),
                "mean_picks": one.mean_picks,
                "share": one.share,
                "copies": copies.get((one.layer, one.expert), 0),
            }
            for one in view.hottest
        ],
    }


def _describe_layer(one: LayerLoadView) -> dict[str, Any]:
    return {
        "layer": one.layer,
        "mean_picks": one.mean_picks,
        "peak_to_average": one.peak_to_average,
        "picks": None if one.picks_QE is None else one.picks_QE.tolist(),
    }


def _print(view: LoadView, copies: Copies, address: str) -> None:
    console = make_console(sys.stdout)
    for worker in view.silent_workers:
        console.print(f"{worker} did not answer; its load is not in", markup=False)
    if view.num_buckets == 0:
        console.print(f"{address} has recorded no load: nothing was computed yet", markup=False)
        return
    console.print(
        f"{address}: {view.num_buckets} buckets of {view.bucket_s:g} s within {view.span_s:.1f} s, "
        f"of {', '.join(view.workers)}",
        markup=False,
    )
    layers = Table(title="Layers", title_justify="left")
    for column in ("layer", "picks, mean", "hottest expert over average"):
        layers.add_column(column, justify="right")
    for one in view.layers:
        layers.add_row(str(one.layer), f"{one.mean_picks:,.1f}", f"{one.peak_to_average:.2f}")
    console.print(layers)
    if not view.hottest:
        return
    experts = Table(title="Hottest experts", title_justify="left")
    quantiles = [f"at {quantile:g}" for quantile in view.quantiles]
    for column in ("layer", "expert", "copies", *quantiles, "mean", "of its layer"):
        experts.add_column(column, justify="right")
    for hot in view.hottest:
        experts.add_row(
            str(hot.layer),
            str(hot.expert),
            str(copies.get((hot.layer, hot.expert), 0)),
            *(f"{picks:,.0f}" for picks in hot.picks),
            f"{hot.mean_picks:,.1f}",
            f"{100 * hot.share:.1f} %",
        )
    console.print(experts)
