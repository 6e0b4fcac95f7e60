"""A whole server in one process, one request at a time: for the command line and for tests.

The same attention side, router, frames and expert side as in a cluster, joined by the `local`
transport and all on the calling thread: while the engine waits for answers, the expert worker is
stepped. (With two threads they wait for each other's interpreter lock.)
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.admission import EngineLimits, blocks_needed
from actors.engine.outcome import StepOutcome
from actors.engine.prompt_sharing import split_choices
from actors.engine.request import RequestKey
from actors.engine.step_loop import Engine
from actors.expert_store import ExpertStore, ExpertStoreSettings
from actors.expert_worker import ExpertWorker, ExpertWorkerSettings
from actors.grammar_loading import load_grammars
from actors.inline_router import InlineRouter
from actors.request_channel import Ended, LogitRows, Sampling, Submit, Usage
from configs.errors import InvariantError, ServingError
from configs.ids import Generation, RequestId, WorkerId
from configs.numerics import Combine, EndReason, FinishReason, FloatType, Numerics
from model.cache import allocate_memory
from model.checkpoint import Checkpoint, Progress
from model.decoder import Decoder
from model.experts import Activation
from router.combine import TORCH_TYPES
from router.latent_router import LatentRouter
from router.membership import Membership
from router.pick_observer import PickObserver
from router.placement import Placement, plan_initial_placement
from router.settings import RouterCounters, RouterSettings

_names = itertools.count()


@dataclass(frozen=True, slots=True)
class SingleProcessSettings:
    """How a single process computes. Defaults are those of `configs/schema.py`."""

    max_request_tokens: int = 4096
    """Prompt plus answer that memory is allocated for; the model's context limits it too."""
    compute_dtype: FloatType = FloatType.FLOAT32
    wire_dtype: FloatType = FloatType.FLOAT32
    numerics: Numerics = Numerics.FAST
    device: str = "cpu"
    max_step_tokens: int = 512
    block_tokens: int = 64
    num_state_slots: int = 1
    """Requests, or answers to one prompt, that run at once."""
    dispatch_timeout_s: float = 600.0
    """Long: nothing can be lost here but time."""


@dataclass(frozen=True, slots=True)
class Generated:
    """A finished answer."""

    token_ids: tuple[int, ...]
    """A stop token is the last one."""
    finish_reason: FinishReason
    usage: Usage


class SingleProcess:
    """One checkpoint, loaded. A context manager; calls one at a time, from one thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: SingleProcessSettings,
        *,
        progress: Progress | None = None,
        observer: PickObserver | None = None,
    ) -> None:
        """Load a checkpoint.

        Args:
            checkpoint: Opened.
            settings: How to compute.
            progress: Advanced by loaded bytes; their sum is `loaded_bytes(checkpoint, settings)`.
            observer: Told of all picks.

        Raises:
            CheckpointError: A file cannot be read.
        """
        dims = checkpoint.dims
        number = next(_names)
        self._settings = settings
        self._grammars = load_grammars(checkpoint)
        self._vocab_size = dims.vocab_size
        self._eos_token_ids = dims.eos_token_ids
        self._dtype = TORCH_TYPES[settings.compute_dtype]
        self._device = torch.device(settings.device)
        self._ids = itertools.count()
        expert_name = WorkerId(f"single-process-{number}-expert-0")
        placement = plan_initial_placement(
            moe_layers=dims.moe_layers, num_experts=dims.moe.num_experts, workers=[expert_name]
        )
        store = self._make_store(checkpoint, expert_name)
        store.load(placement, checkpoint, progress=progress)
        self._expert = ExpertWorker(
            worker=expert_name, compute=store, settings=ExpertWorkerSettings()
        )
        self._router = LatentRouter(
            worker=WorkerId(f"single-process-{number}-attention-0"),
            settings=RouterSettings(
                latent_size=dims.moe.latent_size,
                wire_dtype=settings.wire_dtype,
                combine=Combine.CANONICAL,
                dispatch_timeout_s=settings.dispatch_timeout_s,
                transport="local",
            ),
            observer=observer,
        )
        self._engine = self._make_engine(checkpoint, progress)
        self._connect(placement)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End the links. Idempotent."""
        self._router.close()
        self._expert.close()

    @property
    def counters(self) -> RouterCounters:
        """What crossed between the two sides so far."""
        return self._router.counters

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        stop_token_ids: Sequence[int] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Generated:
        """Answer a prompt; see `run` for more than one answer, grammars and log-probabilities.

        Args:
            token_ids: Prompt, not empty.
            max_tokens: At least 1.
            sampling: Greedy if None.
            stop_token_ids: Those of the model if None.
            on_token: Called with each token as it comes.

        Raises:
            InvalidRequestError: A value is out of range.
            RequestTooLargeError: Prompt and answer exceed what memory was allocated for.
            ServingError: The computation failed.
        """
        submit = Submit(
            request_id=self.next_id(),
            attempt=0,
            token_ids=list(token_ids),
            max_tokens=max_tokens,
            sampling=Sampling() if sampling is None else sampling,
            stop_token_ids=list(self._eos_token_ids if stop_token_ids is None else stop_token_ids),
            credit_tokens=max(max_tokens, 0),
        )
        tokens: list[int] = []
        finish: FinishReason | None = None
        usage = Usage()
        for outcome in self.run([submit]):
            for news in outcome.tokens:
                tokens.extend(news.token_ids)
                if on_token is not None:
                    for token in news.token_ids:
                        on_token(token)
            for ended in outcome.ended:
                finish, usage = ended.finish_reason, ended.usage
        if finish is None:
            raise InvariantError(f"request {submit.request_id} finished without a reason")
        return Generated(tuple(tokens), finish, usage)

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after every position of a prompt, `[T, vocab]`.

        Raises:
            InvalidRequestError: A token id is out of range, or there is none.
            RequestTooLargeError: The prompt exceeds what memory was allocated for.
            ServingError: The computation failed.
        """
        submit = Submit(
            request_id=self.next_id(),
            attempt=0,
            token_ids=list(token_ids),
            max_tokens=0,
            sampling=Sampling(),
            stop_token_ids=[],
            credit_tokens=len(token_ids),
            want_logits=True,
        )
        rows: list[NDArray[np.float32]] = []

        def take(news: LogitRows) -> None:
            data = np.frombuffer(news.data, dtype="<f4")
            rows.append(
                data.reshape(news.num_rows, self._vocab_size).astype(np.float32, copy=False)
            )

        for outcome in self.run([submit]):
            for news in outcome.logits:
                take(news)
        return np.concatenate(rows)

    def run(self, submits: Sequence[Submit]) -> Generator[StepOutcome, None, None]:
        """Run submissions side by side and yield the news of each step until all have ended.

        Raises:
            InvalidRequestError: Two of them have the same name.
            ServingError: One of them did not finish; the others are given up.
        """
        engine = self._engine
        keys = {
            RequestKey(one.request_id, one.attempt)
            for submit in submits
            for one in split_choices(submit)
        }
        try:
            for submit in submits:
                engine.submit(submit, time.monotonic())
            num_live = len(keys)
            while num_live:
                outcome = engine.step(time.monotonic())
                for ended in outcome.ended:
                    if ended.reason is not EndReason.FINISHED:
                        raise _error_of(ended)
                num_live -= len(outcome.ended)
                yield outcome
        finally:
            # Left early by an exception or Ctrl-C: nothing may stay for the next call.
            left = [key for key in keys if engine.is_live(key)]
            if left:
                self._router.abandon_step()
            for key in left:
                engine.discard(key, time.monotonic())

    def next_id(self) -> RequestId:
        """Return a name for a submission that no other has."""
        return RequestId(f"single-{next(self._ids)}")

    def _make_store(self, checkpoint: Checkpoint, worker: WorkerId) -> ExpertStore:
        dims = checkpoint.dims
        return ExpertStore(
            worker=worker,
            settings=ExpertStoreSettings(
                latent_size=dims.moe.latent_size,
                activation=Activation.of(dims),
                numerics=self._settings.numerics,
                dtype=self._dtype,
                device=self._device,
            ),
        )

    def _make_engine(self, checkpoint: Checkpoint, progress: Progress | None) -> Engine:
        settings, dims = self._settings, checkpoint.dims
        weights = checkpoint.load_attention_side(
            dtype=self._dtype, device=self._device, progress=progress
        )
        num_blocks = settings.num_state_slots * blocks_needed(
            min(settings.max_request_tokens, dims.context_tokens), settings.block_tokens
        )
        return Engine(
            model=Decoder(dims, weights, numerics=settings.numerics),
            memory=allocate_memory(
                dims,
                num_blocks=num_blocks,
                block_size=settings.block_tokens,
                num_slots=settings.num_state_slots,
                dtype=self._dtype,
                device=self._device,
            ),
            router=InlineRouter(self._router, self._expert),
            limits=EngineLimits(
                vocab_size=dims.vocab_size,
                context_tokens=dims.context_tokens,
                num_blocks=num_blocks,
                block_tokens=settings.block_tokens,
                num_state_slots=settings.num_state_slots,
                max_step_tokens=settings.max_step_tokens,
                max_queued_requests=1 << 20,
            ),
            clock=time.monotonic,
            wait_timeout_s=settings.dispatch_timeout_s,
            grammars=self._grammars,
        )

    def _connect(self, placement: Placement) -> None:
        info = self._expert.listen(
            directory=Path(tempfile.gettempdir()), host="127.0.0.1", transports=("local",)
        )
        self._router.connect(Membership(Generation(1), (info,)))
        self._router.set_placement(placement)


def loaded_bytes(checkpoint: Checkpoint, settings: SingleProcessSettings) -> int:
    """Bytes that loading advances a progress by."""
    dims = checkpoint.dims
    dtype = TORCH_TYPES[settings.compute_dtype]
    num_experts = len(dims.moe_layers) * dims.moe.num_experts
    return checkpoint.attention_side_bytes(dtype) + num_experts * checkpoint.expert_bytes(dtype)


def _error_of(ended: Ended) -> ServingError:
    """The error that ended a request, of its own class again."""
    text = ended.error_message or f"request {ended.request_id} ended as {ended.reason}"
    classes: list[type[ServingError]] = [ServingError]
    for known in classes:
        if known.code == ended.error_code:
            return known(text)
        classes.extend(known.__subclasses__())
    return InvariantError(f"{text} (code {ended.error_code!r})")
