"""`latentmesh init-checkpoint`: a random checkpoint in the released layout, to try things out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.cli.progress import byte_progress
from model.checkpoint_spec import CheckpointSpec
from model.checkpoint_writer import checkpoint_bytes, write_checkpoint
from model.dims_reading import load_config, read_dims
from model.storage import read_storage
from model.tokenizer_files import BYTE_VOCAB_SIZE


def init_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Folder to make; must be empty or absent.")],
    *,
    like: Annotated[
        Path | None,
        typer.Option(help="Take shape and storage from this config.json or checkpoint folder."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0,
    sharded: Annotated[bool, typer.Option(help="One file per layer and an index.")] = False,
) -> None:
    """Write random weights, config and tokenizer files. What such a model says is noise."""
    spec = CheckpointSpec(is_sharded=sharded) if like is None else _spec_like(like, sharded=sharded)
    total = checkpoint_bytes(spec)
    with byte_progress(f"writing {folder}", total) as progress:
        write_checkpoint(folder, spec, seed=seed, progress=progress)
    typer.echo(f"{folder}: {total:,} bytes of weights")


def _spec_like(source: Path, *, sharded: bool) -> CheckpointSpec:
    config = load_config(source)
    dims = read_dims(config)
    return CheckpointSpec(
        dims=dims,
        storage=read_storage(config),
        is_sharded=sharded,
        has_tokenizer=dims.vocab_size >= BYTE_VOCAB_SIZE,
    )
