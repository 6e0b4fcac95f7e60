"""`latentmesh score`: the logits of every prompt position as a numpy file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from actors.single_process import SingleProcessSettings
from cluster.api.client import LatentmeshClient
from cluster.api.validation import ScoreParams
from cluster.cli.prompt import (
    CheckpointOption,
    ComputeDtypeOption,
    NumericsOption,
    PromptArgument,
    ServerOption,
    TokenIdsOption,
    check_place,
    encode_prompt,
    find_tokenizer,
    local_model,
    parse_prompt,
)
from configs.errors import ConfigError
from configs.numerics import FloatType, Numerics


def score(
    prompt: PromptArgument = None,
    *,
    logits: Annotated[Path, typer.Option(help="File to write: float32 [T, vocab], .npy.")],
    token_ids: TokenIdsOption = None,
    checkpoint: CheckpointOption = None,
    server: ServerOption = None,
    compute_dtype: ComputeDtypeOption = FloatType.FLOAT32,
    numerics: NumericsOption = Numerics.FAST,
) -> None:
    """Write the float32 logits after every position of a prompt."""
    check_place(checkpoint, server)
    words = parse_prompt(prompt, token_ids)
    if not logits.absolute().parent.is_dir():
        raise ConfigError(f"--logits {logits}: its folder does not exist")
    if server is not None:
        with LatentmeshClient(server) as client:
            rows = client.score(ScoreParams(prompt=words))
    elif checkpoint is not None:
        rows = _score_here(words, checkpoint, compute_dtype, numerics)
    with logits.open("wb") as file:
        np.save(file, rows)
    typer.echo(f"{logits}: float32 {list(rows.shape)}")


def _score_here(
    words: str | list[int], folder: Path, compute_dtype: FloatType, numerics: Numerics
) -> NDArray[np.float32]:
    token_ids = encode_prompt(words, find_tokenizer(folder), folder)
    with local_model(
        folder,
        lambda _: SingleProcessSettings(
            max_request_tokens=max(len(token_ids), 1),
            compute_dtype=compute_dtype,
            numerics=numerics,
        ),
    ) as (process, _):
        return process.score(token_ids)
