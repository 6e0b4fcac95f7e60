"""What `generate` and `score` share: the prompt and where it is answered."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from actors.single_process import SingleProcess, SingleProcessSettings, loaded_bytes
from cluster.cli.progress import byte_progress
from configs.errors import ConfigError, InvalidRequestError, TokenizerMissingError
from configs.numerics import FloatType, Numerics
from model.checkpoint import Checkpoint
from model.tokenizer import Tokenizer

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


@contextmanager
def local_model(
    folder: Path, choose_settings: Callable[[Checkpoint], SingleProcessSettings]
) -> Iterator[tuple[SingleProcess, Checkpoint]]:
    """Load a checkpoint into this process, with a progress bar."""
    # Half the cores, as in a cluster of one worker of each kind: threads that spin on a busy
    # machine cost far more than the second half brings.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    checkpoint = Checkpoint.open(folder)
    settings = choose_settings(checkpoint)
    with byte_progress(f"loading {folder}", loaded_bytes(checkpoint, settings)) as progress:
        process = SingleProcess(checkpoint, settings, progress=progress)
    with process:
        yield process, checkpoint


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None where it has none."""
    try:
        return Tokenizer.load(folder)
    except TokenizerMissingError:
        return None


def encode_prompt(prompt: str | list[int], tokenizer: Tokenizer | None, folder: Path) -> list[int]:
    """Token ids of a prompt.

    Raises:
        TokenizerMissingError: Text was given and there is no tokenizer.
        InvalidRequestError: The text is empty.
    """
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        tokenizer = Tokenizer.load(folder)
    if not prompt:
        raise InvalidRequestError("the prompt is empty; at least 1 character is needed")
    return tokenizer.encode(prompt)
