"""The two operations, whatever protocol they are asked through: generate and score.

Has a request planned and accepted, shapes what comes back, counts and traces it. Knows neither gRPC
nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import numpy as np
from opentelemetry.trace import Span

from actors.request_channel import LogitRows
from cluster.api.answer_shaper import AnswerShaper, prompt_chunk
from cluster.api.answers import ChatFormat, Chunk, Finished, ScoreRows
from cluster.api.cache_flush import FlushResult
from cluster.api.gateway_settings import GatewaySettings
from cluster.api.merging import merge
from cluster.api.params import GenerateParams, ScoreParams
from cluster.api.request_outcome import Outcome
from cluster.api.request_planner import RequestPlanner
from cluster.api.request_router import RequestRouter
from cluster.api.request_spec import Operation, RequestSpec
from cluster.api.request_stream import News, RequestStream
from cluster.api.validation import Limits
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
from configs.errors import InvariantError, ServingError
from configs.metrics import (
    FINISHED_ANSWERS,
    REFUSED_REQUESTS,
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
)
from configs.numerics import FinishReason
from model.chat.values import Conversation
from model.tokenizer import Tokenizer

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
        self._planner = RequestPlanner(
            Limits(
                model_name=settings.model_name,
                vocab_size=settings.vocab_size,
                context_tokens=settings.context_tokens,
                has_tokenizer=tokenizer is not None,
            ),
            tokenizer,
            eos_token_ids=settings.eos_token_ids,
        )
        self._metrics = metrics
        self._tracer = tracer

    @property
    def limits(self) -> Limits:
        """What requests are checked against."""
        return self._planner.limits

    async def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text; raises `TokenizerMissingError` without a tokenizer."""
        return await self._planner.encode_text(text)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """Return the prompt that asks for the next message of a conversation.

        Raises:
            InvalidRequestError: A message makes no sense; names it.
            TokenizerMissingError: The checkpoint has no tokenizer.
        """
        return await self._planner.encode_chat(conversation)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, the name of a special one; empty without a tokenizer."""
        if not self.limits.has_tokenizer:
            return b""
        return self._planner.tokenizer.decode_bytes((token_id,), with_special=True)

    async def flush_cache(self) -> FlushResult:
        """Make every connected worker forget the prefixes that no request uses.

        Raises:
            NoWorkerError: None is connected.
        """
        return await self._router.flush_cache()

    async def generate(
        self, params: GenerateParams, call: CallContext, *, chat: ChatFormat | None = None
    ) -> AsyncGenerator[Chunk | Finished, None]:
        """Yield chunks, and `Finished` for each choice. Closing the iterator early cancels all.

        Choices come interleaved, each in order. The first that fails ends all of them.

        Args:
            params: Checked here.
            call: What the protocol knows of the call.
            chat: Reads the answer as a message: chunks carry deltas in place of text, and stop
                texts are looked for in the visible part only.

        Raises:
            AdmissionError: The request was refused.
            ServingError: It was accepted and did not finish.
        """
        timing = _Timing(Operation.GENERATE, call.timeout_s)
        name = "text_completion" if chat is None else "chat"
        with self._tracer.span(name, self.limits.model_name, call.carrier) as span:
            _describe(span, params)
            try:
                spec = await self._planner.plan_generate(
                    params, timeout_s=call.timeout_s, worker_tokens=self._router.max_request_tokens
                )
                streams = self._router.open(spec)
            except ServingError as exc:
                self._metrics.add(REFUSED_REQUESTS, operation=Operation.GENERATE, code=exc.code)
                raise
            try:
                shapers = self._planner.make_shapers(params, spec, chat)
                prompt_is_told = asyncio.Event()
                answers = [
                    self._answer(stream, shaper, spec, timing, prompt_is_told)
                    for stream, shaper in zip(streams, shapers, strict=True)
                ]
                async with aclosing(merge(answers)) as merged:
                    async for event in merged:
                        yield event
            finally:
                self._close(streams, timing, span)

    async def score(
        self, params: ScoreParams, call: CallContext
    ) -> AsyncGenerator[ScoreRows, None]:
        """Yield the logits of every prompt position, in order. Closing it early cancels.

        Raises:
            AdmissionError: The request was refused.
            ServingError: It was accepted and did not finish.
        """
        timing = _Timing(Operation.SCORE, call.timeout_s)
        with self._tracer.span("score", self.limits.model_name, call.carrier) as span:
            try:
                spec = await self._planner.plan_score(
                    params, timeout_s=call.timeout_s, worker_tokens=self._router.max_request_tokens
                )
                (stream,) = self._router.open(spec)
            except ServingError as exc:
                self._metrics.add(REFUSED_REQUESTS, operation=Operation.SCORE, code=exc.code)
                raise
            try:
                async for rows in self._rows(stream, num_prompt=len(spec.token_ids)):
                    yield rows
            finally:
                self._close([stream], timing, span)

    async def _answer(
        self,
        stream: RequestStream,
        shaper: AnswerShaper,
        spec: RequestSpec,
        timing: _Timing,
        prompt_is_told: asyncio.Event,
    ) -> AsyncGenerator[Chunk | Finished, None]:
        while True:
            news = await stream.next_news()
            for logprobs in news.prompt_logprobs:
                yield prompt_chunk(logprobs)
            if stream.choice > 0 and spec.prompt_logprobs is not None:
                # The first choice brings them; tokens of others do not come before.
                await prompt_is_told.wait()
            elif news.token_ids or news.outcome is not None:
                prompt_is_told.set()
            chunk = self._push(news, shaper, timing)
            if shaper.matched is not None:
                # At once: the client may be slow to read what there is.
                stream.complete()
            if chunk is not None:
                yield chunk
            if news.outcome is not None:
                break
        if news.outcome.error is not None:
            raise news.outcome.error
        rest = shaper.finish()
        if rest is not None:
            yield rest
        finished = _finished(stream, news.outcome, shaper)
        self._metrics.add(FINISHED_ANSWERS, cause=_cause_of(finished))
        yield finished

    def _push(self, news: News, shaper: AnswerShaper, timing: _Timing) -> Chunk | None:
        if not news.token_ids:
            return None
        if timing.first_token_s is None:
            timing.first_token_s = timing.elapsed_s
            self._metrics.observe(TIME_TO_FIRST_TOKEN, timing.first_token_s)
        return shaper.push(news.token_ids, news.logprobs)

    async def _rows(self, stream: RequestStream, *, num_prompt: int) -> AsyncIterator[ScoreRows]:
        next_position = 0
        outcome = None
        while outcome is None:
            news = await stream.next_news()
            for rows in news.rows:
                for part in _split_rows(rows, vocab_size=self.limits.vocab_size):
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

    def _close(self, streams: Sequence[RequestStream], timing: _Timing, span: Span) -> None:
        for stream in streams:
            stream.close(is_late=timing.is_late)
        self._metrics.observe(REQUEST_DURATION, timing.elapsed_s, operation=timing.operation)
        first = streams[0]
        span.set_attribute(GEN_AI_RESPONSE_ID, first.key.request_id)
        if first.seed <= MAX_INT64:
            span.set_attribute(GEN_AI_REQUEST_SEED, first.seed)
        if timing.first_token_s is not None:
            span.set_attribute(GEN_AI_RESPONSE_FIRST_CHUNK, timing.first_token_s)
        outcomes = [stream.outcome for stream in streams if stream.outcome is not None]
        if not outcomes:
            return
        num_output = sum(outcome.usage.output_tokens for outcome in outcomes)
        span.set_attribute(GEN_AI_USAGE_INPUT_TOKENS, outcomes[0].usage.prompt_tokens)
        span.set_attribute(GEN_AI_USAGE_OUTPUT_TOKENS, num_output)
        reasons = [o.finish_reason.value for o in outcomes if o.finish_reason is not None]
        if reasons:
            span.set_attribute(GEN_AI_RESPONSE_FINISH_REASONS, tuple(reasons))
        errors = [outcome.error.code for outcome in outcomes if outcome.error is not None]
        if errors:
            span.set_attribute(ERROR_TYPE, errors[0])


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


def _finished(stream: RequestStream, outcome: Outcome, shaper: AnswerShaper) -> Finished:
    return shaper.end(
        outcome.finish_reason,
        outcome.usage,
        seed=stream.seed,
        request_id=stream.key.request_id,
    )


def _cause_of(finished: Finished) -> str:
    if finished.finish_reason is FinishReason.LENGTH:
        return "length"
    match finished.matched_stop:
        case str():
            return "stop_text"
        case int():
            return "stop_token"
        case _:
            return "constraint"


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
        GEN_AI_REQUEST_TEMPERATURE: params.sampling.temperature,
        GEN_AI_REQUEST_TOP_P: params.sampling.top_p,
        GEN_AI_REQUEST_TOP_K: params.sampling.top_k,
    }
    for name, value in values.items():
        if value is not None:
            span.set_attribute(name, value)
