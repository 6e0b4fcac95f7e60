"""What `generate` and `score` share: the prompt and where it is answered. Does not load torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol, cast

import numpy as np
import typer
from numpy.typing import NDArray

from cluster.api.answers import Chunk, Finished
from cluster.api.params import GenerateParams
from configs.errors import ConfigError
from configs.numerics import FloatType, Numerics

PromptArgument = Annotated[
    str | None, typer.Argument(metavar="[PROMPT]", help="Text; needs a tokenizer.")
]
TokenIdsOption = Annotated[
    str | None, typer.Option("--token-ids", help="Token ids instead of text: 1,2,3.")
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="Compute in this process from this folder.")
]
ServerOption = Annotated[
    str | None, typer.Option("--server", help="Ask the server at this HOST:PORT (gRPC).")
]
ComputeDtypeOption = Annotated[
    FloatType, typer.Option("--compute-dtype", help="Type of compute, with --checkpoint.")
]
NumericsOption = Annotated[
    Numerics, typer.Option("--numerics", help="Numeric promise, with --checkpoint.")
]


def parse_prompt(prompt: str | None, token_ids: str | None) -> str | list[int]:
    """Return the one prompt that was given.

    Raises:
        ConfigError: None or both were given, or the ids are not numbers.
    """
    if (prompt is None) == (token_ids is None):
        raise ConfigError("give either a PROMPT or --token-ids 1,2,3")
    if token_ids is None:
        return prompt or ""
    try:
        return [int(part) for part in token_ids.split(",")] if token_ids.strip() else []
    except ValueError as exc:
        raise ConfigError(
            f"--token-ids {token_ids!r} is not a list of whole numbers, e.g. 1,2,3"
        ) from exc


def check_place(checkpoint: Path | None, server: str | None) -> None:
    """Raise `ConfigError` unless exactly one place to compute was given."""
    if (checkpoint is None) == (server is None):
        raise ConfigError("give either --checkpoint DIR or --server HOST:PORT")


class LocalModel(Protocol):
    """What `cluster/cli/local_model.py` offers."""

    generate_here: Callable[
        [GenerateParams, Path, FloatType, Numerics, Callable[[Chunk | Finished], None]], None
    ]
    score_here: Callable[[str | list[int], Path, FloatType, Numerics], NDArray[np.float32]]


def local_module() -> LocalModel:
    """Import the module that computes in this process: a client of a server must not load torch."""
    return cast("LocalModel", importlib.import_module("cluster.cli.local_model"))
