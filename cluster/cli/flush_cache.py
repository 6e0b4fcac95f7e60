"""`latentmesh flush-cache`: make the workers of a running cluster forget their cached prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.connection import connect
from cluster.cli.status import DEFAULT_DATA_DIR
from cluster.data_folder import READY_FILE
from cluster.ready_record import read_record


def flush_cache(
    *,
    server: Annotated[
        str | None, typer.Option("--server", metavar="HOST:PORT", help="gRPC address.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Data folder of a cluster here, without --server.")
    ] = DEFAULT_DATA_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Forget every cached prefix that no running request uses. Answers stay the same."""
    address = server if server is not None else read_record(data_dir / READY_FILE).grpc
    with connect(address) as client:
        num_snapshots = client.flush_cache()
    if as_json:
        typer.echo(json.dumps({"server": address, "num_snapshots": num_snapshots}))
        return
    typer.echo(f"{address} forgot {num_snapshots} cached prefixes")
