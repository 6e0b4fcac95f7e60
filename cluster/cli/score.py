"""`latentmesh score`: the logits of every prompt position as a numpy file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from cluster.api.params import ScoreParams
from cluster.cli.connection import connect
from cluster.cli.prompt import (
    CheckpointOption,
    ComputeDtypeOption,
    NumericsOption,
    PromptArgument,
    ServerOption,
    TokenIdsOption,
    check_place,
    local_module,
    parse_prompt,
)
from configs.errors import ConfigError
from configs.numerics import FloatType, Numerics


def score(  # noqa: PLR0913 - one parameter per flag
    prompt: PromptArgument = None,
    *,
    logits: Annotated[Path, typer.Option(help="File to write: float32 [T, vocab], .npy.")],
    token_ids: TokenIdsOption = None,
    checkpoint: CheckpointOption = None,
    server: ServerOption = None,
    compute_dtype: ComputeDtypeOption = FloatType.FLOAT32,
    numerics: NumericsOption = Numerics.FAST,
    timeout: Annotated[float | None, typer.Option(help="Seconds, with --server.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Write the float32 logits after every position of a prompt."""
    check_place(checkpoint, server)
    words = parse_prompt(prompt, token_ids)
    if not logits.absolute().parent.is_dir():
        raise ConfigError(f"--logits {logits}: its folder does not exist")
    if server is not None:
        with connect(server) as client:
            rows = client.score(ScoreParams(prompt=words), timeout_s=timeout)
    elif checkpoint is not None:
        rows = local_module().score_here(words, checkpoint, compute_dtype, numerics)
    with logits.open("wb") as file:
        np.save(file, rows)
    if as_json:
        report = {"logits": str(logits), "dtype": "float32", "shape": list(rows.shape)}
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(f"{logits}: float32 {list(rows.shape)}")
