"""Compute in this process: the `--checkpoint` side of `generate` and `score`.

Imported only when it is used, because it loads torch.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from actors.request_channel import Sampling
from actors.single_process import SingleProcess, SingleProcessSettings, loaded_bytes
from cluster.api.answer_shaper import AnswerShaper, PlainReader
from cluster.api.answers import Chunk, Finished
from cluster.api.params import GenerateParams
from cluster.api.stop_scanner import StopTexts
from cluster.api.validation import Limits, check_generate, resolve_max_tokens
from cluster.cli.progress import byte_progress
from configs.errors import InvalidRequestError, TokenizerMissingError
from configs.ids import RequestId
from configs.numerics import FloatType, Numerics
from model.checkpoint import Checkpoint
from model.tokenizer import IncrementalDetokenizer, Tokenizer

OnChunk = Callable[[Chunk], None]


def generate_here(
    params: GenerateParams,
    folder: Path,
    compute_dtype: FloatType,
    numerics: Numerics,
    on_chunk: OnChunk,
) -> Finished:
    """Answer a prompt in this process; checks and errors as the gateway's."""
    tokenizer = _find_tokenizer(folder)
    prompt = params.prompt if params.prompt is not None else []
    ids = _encode_prompt(prompt if isinstance(prompt, str) else list(prompt), tokenizer, folder)
    num_tokens = 0

    def choose_settings(checkpoint: Checkpoint) -> SingleProcessSettings:
        nonlocal num_tokens
        num_tokens = _check(params, ids, checkpoint)
        return SingleProcessSettings(
            max_request_tokens=len(ids) + num_tokens,
            compute_dtype=compute_dtype,
            numerics=numerics,
        )

    seed = secrets.randbits(63) if params.sampling.seed is None else params.sampling.seed
    with _loaded(folder, choose_settings) as (process, checkpoint):
        stop_ids = () if params.stop.ignore_eos else checkpoint.dims.eos_token_ids
        shaper = AnswerShaper(
            None if tokenizer is None else PlainReader(IncrementalDetokenizer(tokenizer)),
            stop_ids=stop_ids,
            stop_texts=StopTexts(params.stop.texts),
            min_tokens=params.stop.min_tokens,
            includes_stop_text=params.stop.include_text,
        )
        generated = process.generate(
            ids,
            max_tokens=num_tokens,
            sampling=Sampling(
                temperature=params.sampling.temperature or 0.0,
                top_p=1.0 if params.sampling.top_p is None else params.sampling.top_p,
                top_k=params.sampling.top_k or 0,
                seed=seed,
            ),
            stop_token_ids=stop_ids,
            on_token=lambda token: _push(shaper, [token], on_chunk),
        )
        rest = shaper.finish()
        if rest is not None:
            on_chunk(rest)
    return Finished(generated.finish_reason, generated.usage, seed, RequestId("local"))


def _push(shaper: AnswerShaper, token_ids: list[int], on_chunk: OnChunk) -> None:
    chunk = shaper.push(token_ids)
    if chunk is not None:
        on_chunk(chunk)


def _check(params: GenerateParams, ids: list[int], checkpoint: Checkpoint) -> int:
    """Check a local request as the gateway would; returns the tokens to generate."""
    dims = checkpoint.dims
    limits = Limits(
        model_name="", vocab_size=dims.vocab_size, context_tokens=dims.context_tokens,
        has_tokenizer=True,
    )  # fmt: skip
    check_generate(params, limits)
    return resolve_max_tokens(len(ids), params, limits, worker_tokens=dims.context_tokens)


def score_here(
    words: str | list[int], folder: Path, compute_dtype: FloatType, numerics: Numerics
) -> NDArray[np.float32]:
    """Return the logits of every prompt position, float32 `[T, vocab]`."""
    token_ids = _encode_prompt(words, _find_tokenizer(folder), folder)
    with _loaded(
        folder,
        lambda _: SingleProcessSettings(
            max_request_tokens=max(len(token_ids), 1),
            compute_dtype=compute_dtype,
            numerics=numerics,
        ),
    ) as (process, _):
        return process.score(token_ids)


@contextmanager
def _loaded(
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


def _find_tokenizer(folder: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None where it has none."""
    try:
        return Tokenizer.load(folder)
    except TokenizerMissingError:
        return None


def _encode_prompt(prompt: str | list[int], tokenizer: Tokenizer | None, folder: Path) -> list[int]:
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
