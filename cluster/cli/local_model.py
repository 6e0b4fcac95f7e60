"""Compute in this process: the `--checkpoint` side of `generate` and `score`.

Imported only when it is used, because it loads torch.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.outcome import StepOutcome
from actors.request_channel import NewTokens, Submit, Usage, choice_id
from actors.single_process import SingleProcess, SingleProcessSettings, loaded_bytes
from cluster.api.answer_shaper import AnswerShaper, prompt_chunk
from cluster.api.answers import Chunk, Finished
from cluster.api.params import GenerateParams
from cluster.api.request_planner import RequestPlanner
from cluster.api.request_router import draw_seed
from cluster.api.request_spec import RequestSpec
from cluster.api.validation import Limits
from cluster.cli.progress import byte_progress
from configs.errors import InvalidRequestError, TokenizerMissingError
from configs.ids import RequestId
from configs.numerics import FinishReason, FloatType, Numerics
from model.checkpoint import Checkpoint
from model.tokenizer import Tokenizer

MAX_AT_ONCE: Final = 8
"""Answers to one prompt that run at once; more wait for the first to end."""


def generate_here(
    params: GenerateParams,
    folder: Path,
    compute_dtype: FloatType,
    numerics: Numerics,
    on_event: Callable[[Chunk | Finished], None],
) -> None:
    """Answer a prompt in this process; checks, chunks and errors as the gateway's."""
    tokenizer = _find_tokenizer(folder)
    dims = Checkpoint.open(folder).dims
    limits = Limits(
        model_name="",
        vocab_size=dims.vocab_size,
        context_tokens=dims.context_tokens,
        has_tokenizer=tokenizer is not None,
    )
    planner = RequestPlanner(limits, tokenizer, eos_token_ids=dims.eos_token_ids)
    spec = asyncio.run(
        planner.plan_generate(params, timeout_s=None, worker_tokens=dims.context_tokens)
    )
    settings = SingleProcessSettings(
        max_request_tokens=len(spec.token_ids) + spec.max_tokens,
        compute_dtype=compute_dtype,
        numerics=numerics,
        num_state_slots=min(spec.num_choices, MAX_AT_ONCE),
    )
    with _loaded(folder, lambda _: settings) as (process, _):
        submit = _submit_of(spec, process.next_id())
        answers = _Answers(submit, planner.make_shapers(params, spec, None), on_event)
        # Closed at once when all answers have ended, which gives up what still runs.
        with closing(process.run([submit])) as steps:
            for outcome in steps:
                answers.take(outcome)
                if answers.is_over:
                    return


class _Answers:
    """The answers to one submission, on their way to `on_event`."""

    def __init__(
        self,
        submit: Submit,
        shapers: Sequence[AnswerShaper],
        on_event: Callable[[Chunk | Finished], None],
    ) -> None:
        self._submit = submit
        self._on_event = on_event
        self._started_at = time.monotonic()
        self._running = {
            choice_id(submit.request_id, choice): shaper for choice, shaper in enumerate(shapers)
        }

    @property
    def is_over(self) -> bool:
        """All of them have ended."""
        return not self._running

    def take(self, outcome: StepOutcome) -> None:
        """Report what a step brought. An answer ends at its stop text, whatever is computed yet."""
        for told in outcome.prompt_logprobs:
            self._on_event(prompt_chunk(told))
        for news in outcome.tokens:
            self._take_tokens(news)
        for ended in outcome.ended:
            self._end(ended.request_id, ended.finish_reason, ended.usage)

    def _take_tokens(self, news: NewTokens) -> None:
        shaper = self._running.get(news.request_id)
        if shaper is None:
            return
        self._report(shaper.push(news.token_ids, news.logprobs))
        if shaper.matched is not None:
            num_prompt = len(self._submit.token_ids)
            usage = Usage(
                prompt_tokens=num_prompt,
                computed_tokens=num_prompt,
                total_s=time.monotonic() - self._started_at,
            )
            self._end(news.request_id, FinishReason.STOP, usage)

    def _end(self, name: RequestId, reason: FinishReason | None, usage: Usage) -> None:
        shaper = self._running.pop(name, None)
        if shaper is not None:
            self._report(shaper.finish())
            seed = self._submit.sampling.seed
            self._on_event(shaper.end(reason, usage, seed=seed, request_id=name))

    def _report(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            self._on_event(chunk)


def _submit_of(spec: RequestSpec, request_id: RequestId) -> Submit:
    seed = draw_seed() if spec.seed is None else spec.seed
    return Submit(
        request_id=request_id,
        attempt=0,
        token_ids=spec.token_ids,
        max_tokens=spec.max_tokens,
        sampling=msgspec.structs.replace(spec.sampling, seed=seed),
        stop_token_ids=spec.stop_token_ids,
        credit_tokens=spec.max_tokens,
        num_choices=spec.num_choices,
        grammar=spec.grammar,
        logprobs=spec.logprobs,
        prompt_logprobs=spec.prompt_logprobs,
    )


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
