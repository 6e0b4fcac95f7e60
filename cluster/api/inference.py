"""The two operations, whatever protocol they are asked through: generate and score.

Validates, tokenises, has the request accepted, shapes what comes back, counts and traces it. Knows
neither gRPC nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from opentelemetry.trace import Span

from actors.request_channel import LogitRows, Sampling
from cluster.api.answers import AnswerShaper, Chunk, Finished, ScoreRows
from cluster.api.gateway_settings import GatewaySettings
from cluster.api.request_router import Operation, RequestRouter, RequestSpec
from cluster.api.request_stream import Outcome, RequestStream
from cluster.api.validation import (
    GenerateParams,
    Limits,
    ScoreParams,
    check_generate,
    check_prompt,
    check_prompt_length,
    resolve_max_tokens,
)
from cluster.telemetry import (
    ERROR_TYPE,
    GEN_AI_REQUEST_MAX_TOKENS,
    GEN_AI_REQUEST_SEED,
    GEN_AI_REQUEST_TEMPERATURE,
    GEN_AI_REQUEST_TOP_K,
    GEN_AI_REQUEST_TOP_P,
    GEN_AI_RESPONSE_FINISH_REASONS,
    GEN_AI_RESPONSE_FIRST_CHUNK,
    GEN_AI_RESPONSE_ID,
    GEN_AI_USAGE_INPUT_TOKENS,
    GEN_AI_USAGE_OUTPUT_TOKENS,
    Metrics,
    RequestTracer,
)
from configs.errors import InvariantError, RequestTooLargeError, ServingError
from configs.metrics import REFUSED_REQUESTS, REQUEST_DURATION, TIME_TO_FIRST_TOKEN
from model.tokenizer import IncrementalDetokenizer, Tokenizer

MAX_SCORE_BYTES: Final = 1 << 20
"""Bytes of one score message at most, or a single row: gRPC clients take 4 MiB by default."""

MAX_INT64: Final = (1 << 63) - 1
"""Largest integer that a span attribute holds."""
LATE_SHARE: Final = 0.98
"""A client that leaves after this share of its timeout left because of it: gRPC rounds timeouts up
by as much as 1 % on the wire, so the client's deadline passes before the server's."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What the protocol knows of a call."""

    timeout_s: float | None
    """Seconds left of the client's deadline; None has none."""
    carrier: Mapping[str, str]
    """Metadata that may hold a W3C `traceparent`."""


class Inference:
    """Generate and score on the workers of one gateway."""

    def __init__(
        self,
        settings: GatewaySettings,
        router: RequestRouter,
        *,
        tokenizer: Tokenizer | None,
        metrics: Metrics,
        tracer: RequestTracer,
    ) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._tracer = tracer
        self._eos_token_ids = settings.eos_token_ids
        self._limits = Limits(
            model_name=settings.model_name,
            vocab_size=settings.vocab_size,
            context_tokens=settings.context_tokens,
            has_tokenizer=tokenizer is not None,
        )

    async def generate(
        self, params: GenerateParams, call: CallContext
    ) -> AsyncGenerator[Chunk | Finished, None]:
        """Yield chunks and at last `Finished`. Closing the iterator early cancels the request.

        Raises:
            AdmissionError: The request was refused.
            ServingError: It was accepted and did not finish.
        """
        timing = _Timing(Operation.GENERATE, call.timeout_s)
        with self._tracer.span("text_completion", self._limits.model_name, call.carrier) as span:
            _describe(span, params)
            try:
                spec = await self._generate_spec(params, call)
                stream = self._router.open(spec)
            except ServingError as exc:
                self._metrics.add(REFUSED_REQUESTS, operation=Operation.GENERATE, code=exc.code)
                raise
            shaper = AnswerShaper(
                detokenizer=self._detokenizer(),
                stop_ids=spec.stop_token_ids,
                resume_offset=params.resume_offset,
            )
            try:
                async for event in self._answer(stream, shaper, timing):
                    yield event
            finally:
                self._close(stream, timing, span)

    async def score(
        self, params: ScoreParams, call: CallContext
    ) -> AsyncGenerator[ScoreRows, None]:
        """Yield the logits of every prompt position, in order. Closing it early cancels.

        Raises:
            AdmissionError: The request was refused.
            ServingError: It was accepted and did not finish.
        """
        timing = _Timing(Operation.SCORE, call.timeout_s)
        with self._tracer.span("score", self._limits.model_name, call.carrier) as span:
            try:
                spec = await self._score_spec(params, call)
                stream = self._router.open(spec)
            except ServingError as exc:
                self._metrics.add(REFUSED_REQUESTS, operation=Operation.SCORE, code=exc.code)
                raise
            try:
                async for rows in self._rows(stream, num_prompt=len(spec.token_ids)):
                    yield rows
            finally:
                self._close(stream, timing, span)

    async def _answer(
        self, stream: RequestStream, shaper: AnswerShaper, timing: _Timing
    ) -> AsyncIterator[Chunk | Finished]:
        while True:
            news = await stream.next_news()
            if news.token_ids:
                if timing.first_token_s is None:
                    timing.first_token_s = timing.elapsed_s
                    self._metrics.observe(TIME_TO_FIRST_TOKEN, timing.first_token_s)
                chunk = shaper.push(news.token_ids)
                if chunk is not None:
                    yield chunk
            if news.outcome is not None:
                break
        if news.outcome.error is not None:
            raise news.outcome.error
        rest = shaper.finish()
        if rest is not None:
            yield rest
        yield _finished(stream, news.outcome)

    async def _rows(self, stream: RequestStream, *, num_prompt: int) -> AsyncIterator[ScoreRows]:
        next_position = 0
        outcome = None
        while outcome is None:
            news = await stream.next_news()
            for rows in news.rows:
                for part in _split_rows(rows, vocab_size=self._limits.vocab_size):
                    if part.first_position != next_position:
                        raise InvariantError(
                            f"request {rows.request_id}: logits of position {part.first_position} "
                            f"came where {next_position} was due"
                        )
                    next_position += len(part.logits)
                    yield part
            outcome = news.outcome
        if outcome.error is not None:
            raise outcome.error
        if next_position != num_prompt:
            raise InvariantError(
                f"request {stream.key.request_id}: logits of {next_position} of {num_prompt} "
                "positions came"
            )

    async def _generate_spec(self, params: GenerateParams, call: CallContext) -> RequestSpec:
        token_ids = await self._token_ids(check_generate(params, self._limits))
        max_tokens = resolve_max_tokens(
            len(token_ids),
            params,
            self._limits,
            worker_tokens=self._router.max_request_tokens,
        )
        own_stops = () if params.ignore_eos else self._eos_token_ids
        return RequestSpec(
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=Sampling(
                temperature=0.0 if params.temperature is None else params.temperature,
                top_p=1.0 if params.top_p is None else params.top_p,
                # More than the vocabulary keeps all of it, as 0 does.
                top_k=0 if params.top_k is None else min(params.top_k, self._limits.vocab_size),
            ),
            seed=params.seed,
            stop_token_ids=list(dict.fromkeys((*own_stops, *params.stop_token_ids))),
            timeout_s=call.timeout_s,
        )

    async def _score_spec(self, params: ScoreParams, call: CallContext) -> RequestSpec:
        prompt = check_prompt(params.model, params.prompt, self._limits)
        token_ids = await self._token_ids(prompt)
        check_prompt_length(len(token_ids), self._limits, num_reserved=0)
        worker_tokens = self._router.max_request_tokens
        if len(token_ids) > worker_tokens:
            raise RequestTooLargeError(
                f"prompt has {len(token_ids)} tokens; {worker_tokens} fit a worker's memory; "
                "shorten it, or raise attention_pool.num_blocks"
            )
        return RequestSpec(
            token_ids=token_ids,
            max_tokens=0,
            sampling=Sampling(),
            seed=0,
            stop_token_ids=[],
            timeout_s=call.timeout_s,
            operation=Operation.SCORE,
        )

    async def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._tokenizer is None:
            raise InvariantError("text passed validation without a tokenizer")
        # In a thread: a long prompt takes seconds, and every other stream shares this loop.
        return await asyncio.to_thread(self._tokenizer.encode, prompt)

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        return None if self._tokenizer is None else IncrementalDetokenizer(self._tokenizer)

    def _close(self, stream: RequestStream, timing: _Timing, span: Span) -> None:
        stream.close(is_late=timing.is_late)
        self._metrics.observe(REQUEST_DURATION, timing.elapsed_s, operation=timing.operation)
        span.set_attribute(GEN_AI_RESPONSE_ID, stream.key.request_id)
        if stream.seed <= MAX_INT64:
            span.set_attribute(GEN_AI_REQUEST_SEED, stream.seed)
        if timing.first_token_s is not None:
            span.set_attribute(GEN_AI_RESPONSE_FIRST_CHUNK, timing.first_token_s)
        outcome = stream.outcome
        if outcome is None:
            return
        span.set_attribute(GEN_AI_USAGE_INPUT_TOKENS, outcome.usage.prompt_tokens)
        span.set_attribute(GEN_AI_USAGE_OUTPUT_TOKENS, outcome.usage.output_tokens)
        if outcome.finish_reason is not None:
            span.set_attribute(GEN_AI_RESPONSE_FINISH_REASONS, (outcome.finish_reason.value,))
        if outcome.error is not None:
            span.set_attribute(ERROR_TYPE, outcome.error.code)


class _Timing:
    """When things happened to one call."""

    def __init__(self, operation: Operation, timeout_s: float | None) -> None:
        self.operation = operation
        self.first_token_s: float | None = None
        self._timeout_s = timeout_s
        self._started_at = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def is_late(self) -> bool:
        return self._timeout_s is not None and self.elapsed_s >= LATE_SHARE * self._timeout_s


def _finished(stream: RequestStream, outcome: Outcome) -> Finished:
    if outcome.finish_reason is None:
        raise InvariantError(f"request {stream.key.request_id} finished without a reason")
    return Finished(
        finish_reason=outcome.finish_reason,
        usage=outcome.usage,
        seed=stream.seed,
        request_id=stream.key.request_id,
    )


def _split_rows(rows: LogitRows, *, vocab_size: int) -> Iterator[ScoreRows]:
    """Cut rows into parts of `MAX_SCORE_BYTES`, whole rows each."""
    if len(rows.data) != rows.num_rows * vocab_size * 4:
        raise InvariantError(
            f"request {rows.request_id}: {len(rows.data)} bytes of logits for {rows.num_rows} rows "
            f"of {vocab_size} values"
        )
    logits = np.frombuffer(rows.data, dtype="<f4").reshape(rows.num_rows, vocab_size)
    num_rows = max(1, MAX_SCORE_BYTES // (vocab_size * 4))
    for start in range(0, rows.num_rows, num_rows):
        yield ScoreRows(rows.first_position + start, logits[start : start + num_rows])


def _describe(span: Span, params: GenerateParams) -> None:
    values = {
        GEN_AI_REQUEST_MAX_TOKENS: params.max_tokens,
        GEN_AI_REQUEST_TEMPERATURE: params.temperature,
        GEN_AI_REQUEST_TOP_P: params.top_p,
        GEN_AI_REQUEST_TOP_K: params.top_k,
    }
    for name, value in values.items():
        if value is not None:
            span.set_attribute(name, value)
