"""`latentmesh status`: the workers of a running cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.api.topology import AttentionWorkerView, ExpertWorkerView, TopologyView
from cluster.cli.connection import connect
from cluster.cli.worker_table import is_gone, make_console, make_worker_table
from cluster.data_folder import READY_FILE
from cluster.ready_record import read_record
from configs.schema import ServingConfig

DEFAULT_DATA_DIR = Path(str(ServingConfig.model_fields["data_dir"].default))


def status(
    *,
    server: Annotated[
        str | None, typer.Option("--server", metavar="HOST:PORT", help="gRPC address.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Data folder of a cluster here, without --server.")
    ] = DEFAULT_DATA_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show the model, the workers and what they have done."""
    address = server if server is not None else read_record(data_dir / READY_FILE).grpc
    with connect(address) as client:
        view = client.topology()
    if as_json:
        typer.echo(json.dumps(describe(view, address), indent=2))
        return
    console = make_console(sys.stdout)
    model = view.model
    console.print(
        f"[bold]{model.name}[/bold] at {address}, cluster {view.cluster_id}, "
        f"latentmesh {view.version}"
    )
    console.print(
        f"  {model.num_layers} layers, {model.num_experts} experts, "
        f"{model.num_experts_per_token} per token, {model.context_tokens:,} tokens of context"
    )
    console.print(make_worker_table(view))


def describe(view: TopologyView, address: str) -> dict[str, Any]:
    """Return what `status --json` prints; the configuration is an object, not text."""
    tree = asdict(view)
    tree["config"] = json.loads(tree.pop("config_json"))
    tree["server"] = address
    workers: list[AttentionWorkerView | ExpertWorkerView] = [
        *view.attention_workers,
        *view.expert_workers,
    ]
    tree["gone_workers"] = [worker.name for worker in workers if is_gone(worker)]
    return tree
