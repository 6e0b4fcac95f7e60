"""`latentmesh inspect`: what a model costs, from its config alone or from its checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from model.checkpoint import Checkpoint
from model.dims import ModelDims
from model.dims_reading import load_config, read_dims
from model.sizing import ModelSizes, compute_sizes
from model.storage import StorageFormat, read_storage


def inspect(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR_OR_CONFIG_JSON", help="Checkpoint folder, or a config.json."),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Show parameters and bytes per component, active parameters, and the bytes that a token costs.

    A folder with weights is checked tensor by tensor; a config.json is enough for the sizes.
    """
    dims, storage, facts = _read(source)
    sizes = compute_sizes(dims, storage)
    if as_json:
        typer.echo(json.dumps(_to_json(dims, sizes, facts), indent=2))
        return
    console = Console()
    console.print(_component_table(sizes))
    console.print(_cost_table(dims, sizes, facts))


def _read(source: Path) -> tuple[ModelDims, StorageFormat, dict[str, Any]]:
    """Read the shape; of a folder with weights also what its files say."""
    if source.is_dir() and any(source.glob("*.safetensors*")):
        checkpoint = Checkpoint.open(source)
        facts = {
            "num_vision_tensors": checkpoint.num_vision_tensors,
            "num_text_tensors": len(checkpoint.stored),
        }
        return checkpoint.dims, checkpoint.storage, facts
    config = load_config(source)
    return read_dims(config), read_storage(config), {}


def _to_json(dims: ModelDims, sizes: ModelSizes, facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **asdict(sizes),
        **facts,
        "num_layers": dims.num_layers,
        "num_kda_layers": len(dims.kda_layers),
        "num_mla_layers": len(dims.mla_layers),
        "num_moe_layers": len(dims.moe_layers),
        "num_experts": dims.moe.num_experts,
        "num_experts_per_token": dims.moe.num_experts_per_token,
        "hidden_size": dims.hidden_size,
        "latent_size": dims.moe.latent_size,
        "vocab_size": dims.vocab_size,
        "context_tokens": dims.context_tokens,
    }


def _component_table(sizes: ModelSizes) -> Table:
    table = Table(title="Parameters", title_justify="left")
    table.add_column("component")
    for column in ("parameters", "bytes", "share"):
        table.add_column(column, justify="right")
    total_bytes = sizes.routed_expert_bytes + sizes.attention_side_bytes
    for part in sizes.components:
        share = part.num_bytes / total_bytes
        table.add_row(part.name, f"{part.num_parameters:,}", f"{part.num_bytes:,}", f"{share:.1%}")
    table.add_section()
    table.add_row("text total", f"{sizes.num_parameters:,}", f"{total_bytes:,}", "100.0%")
    table.add_row(
        "active per token, without the input embedding", f"{sizes.num_active_parameters:,}", "", ""
    )
    return table


def _cost_table(dims: ModelDims, sizes: ModelSizes, facts: dict[str, Any]) -> Table:
    table = Table(title="What it costs to serve", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [
        ("layers: KDA + MLA", f"{len(dims.kda_layers)} + {len(dims.mla_layers)}"),
        ("attention side, bytes as stored", f"{sizes.attention_side_bytes:,}"),
        ("routed experts, bytes as stored", f"{sizes.routed_expert_bytes:,}"),
        ("one routed expert, bytes as stored", f"{sizes.bytes_per_expert:,}"),
        ("KV bytes per token (bf16)", f"{sizes.kv_bytes_per_token:,}"),
        ("KDA state bytes per request (fp32)", f"{sizes.kda_state_bytes_per_request:,}"),
        ("conv state bytes per request (bf16)", f"{sizes.conv_state_bytes_per_request:,}"),
        (
            "boundary bytes per token, MoE layer and direction (bf16 latent)",
            f"{sizes.boundary_bytes_per_token:,}",
        ),
        ("the same at full width", f"{dims.hidden_size * 2:,}"),
    ]
    if "num_vision_tensors" in facts:
        rows.append(("vision tensors, skipped", f"{facts['num_vision_tensors']:,}"))
    for name, value in rows:
        table.add_row(name, value)
    return table
