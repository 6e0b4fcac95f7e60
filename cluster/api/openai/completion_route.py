"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from actors.request_channel import TokenLogprobs
from cluster.api.answers import Chunk, Finished
from cluster.api.inference import CallContext, Inference
from cluster.api.merging import merge
from cluster.api.openai.answers import Envelope, UsageSum, finite
from cluster.api.openai.completion_fields import DEFAULT_MAX_TOKENS, CompletionRequest
from cluster.api.params import GenerateParams
from configs.numerics import FinishReason

KIND = "text_completion"


@dataclass(slots=True)
class _Prompt:
    """A prompt that is echoed."""

    token_ids: list[int]
    text: str


@dataclass(slots=True)
class _TextSum:
    """One whole text, from its chunks."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    finish_reason: str = ""


class TextCompletion:
    """One request, from its fields to its answer. Choice i of prompt p has index p * n + i."""

    def __init__(self, inference: Inference, wanted: CompletionRequest, call: CallContext) -> None:
        """Answer `wanted`; nothing is done before `start`."""
        self._inference = inference
        self._wanted = wanted
        self._call = call
        self._num_choices = wanted.n or 1
        self._envelope = Envelope.make("cmpl", inference.limits.model_name)
        self._prompts: list[_Prompt] = []
        self._offsets: dict[int, int] = {}

    async def start(self) -> AsyncGenerator[Chunk | Finished, None]:
        """Return the events of all answers.

        Raises:
            AdmissionError: The request makes no sense; the rest is found with the first event.
        """
        self._wanted.check()
        sources = []
        for number, prompt in enumerate(self._wanted.prompts()):
            params = await self._params(prompt)
            answer = self._inference.generate(params, self._call)
            sources.append(_numbered(answer, number * self._num_choices))
        return merge(sources)

    async def whole(self, events: AsyncGenerator[Chunk | Finished, None]) -> dict[str, Any]:
        """Return the answer as one object."""
        sums = [_TextSum() for _ in range(self._num_choices * len(self._prompts))]
        usage = _Usage(self._num_choices)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        async with aclosing(events):
            async for event in events:
                one = sums[event.choice]
                if isinstance(event, Finished):
                    usage.add(event)
                    one.finish_reason = _reason(event)
                    continue
                prompt_logprobs.setdefault(event.choice, []).extend(event.prompt_logprobs)
                one.text.append(event.text)
                one.token_ids.extend(event.token_ids)
                one.logprobs.extend(event.logprobs)
        choices = [
            self._choice(index, one, prompt_logprobs.get(index - index % self._num_choices, []))
            for index, one in enumerate(sums)
        ]
        return self._envelope.wrap(KIND, choices, usage=usage.as_json())

    async def pieces(
        self, events: AsyncGenerator[Chunk | Finished, None]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream."""
        usage = _Usage(self._num_choices)
        begun: set[int] = set()
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Chunk):
                    prompt_logprobs.setdefault(event.choice, []).extend(event.prompt_logprobs)
                    if not event.token_ids and not event.text:
                        continue
                one = _TextSum()
                if isinstance(event, Chunk):
                    one.text.append(event.text)
                    one.token_ids.extend(event.token_ids)
                    one.logprobs.extend(event.logprobs)
                else:
                    usage.add(event)
                    one.finish_reason = _reason(event)
                is_first = event.choice not in begun
                begun.add(event.choice)
                known = prompt_logprobs.get(event.choice - event.choice % self._num_choices, [])
                choice = self._choice(event.choice, one, known, has_prompt=is_first)
                more = {"usage": None} if self._wanted.wants_usage else {}
                yield self._envelope.wrap(KIND, (choice,), **more)
        if self._wanted.wants_usage:
            yield self._envelope.wrap(KIND, (), usage=usage.as_json())

    async def _params(self, prompt: str | list[int]) -> GenerateParams:
        wanted = self._wanted
        await self._remember(prompt)
        has_echoed_logprobs = wanted.echo and wanted.logprobs is not None
        constraint = wanted.structured_outputs
        return GenerateParams(
            prompt=prompt,
            model=wanted.model,
            max_tokens=DEFAULT_MAX_TOKENS if wanted.max_tokens is None else wanted.max_tokens,
            sampling=wanted.sampling_params(),
            stop=wanted.stop_params(),
            num_choices=self._num_choices,
            constraint=None if constraint is None else constraint.to_constraint(),
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.logprobs if has_echoed_logprobs else None,
            priority=wanted.priority,
        )

    async def _remember(self, prompt: str | list[int]) -> None:
        if not self._wanted.echo:
            self._prompts.append(_Prompt([], ""))
            return
        ids = prompt
        if isinstance(ids, str):
            ids = await self._inference.encode_text(ids)
        text = prompt if isinstance(prompt, str) else self._text_of(ids)
        self._prompts.append(_Prompt(list(ids), text))

    def _choice(
        self,
        index: int,
        one: _TextSum,
        prompt_logprobs: list[TokenLogprobs],
        *,
        has_prompt: bool = True,
    ) -> dict[str, Any]:
        prompt = self._prompts[index // self._num_choices] if has_prompt else _Prompt([], "")
        logprobs = None
        if self._wanted.logprobs is not None:
            values: list[TokenLogprobs | None] = list(one.logprobs)
            if prompt.token_ids:
                values = [None, *prompt_logprobs, *values]
            logprobs = self._logprobs(index, [*prompt.token_ids, *one.token_ids], values)
        return {
            "index": index,
            "text": prompt.text + "".join(one.text),
            "logprobs": logprobs,
            "finish_reason": one.finish_reason or None,
        }

    def _logprobs(
        self, index: int, token_ids: list[int], values: list[TokenLogprobs | None]
    ) -> dict[str, Any]:
        tokens = [self._text_of([token]) for token in token_ids]
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [None if one is None else finite(one.logprob) for one in values],
            "top_logprobs": [None if one is None else self._tops(one) for one in values],
            "text_offset": offsets,
        }

    def _tops(self, logprobs: TokenLogprobs) -> dict[str, float]:
        tops = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        told: dict[str, float] = {}
        for token, value in tops:
            # Tokens that are half a character read alike; the most likely one stays.
            told.setdefault(self._text_of([token]), finite(value))
        return told

    def _text_of(self, token_ids: list[int]) -> str:
        data = b"".join(self._inference.token_bytes(token) for token in token_ids)
        return data.decode("utf-8", "replace")


class _Usage(UsageSum):
    """Usage over several prompts: each one's first choice carries its cost."""

    def __init__(self, num_choices: int) -> None:
        super().__init__()
        self._num_choices = num_choices

    def add(self, finished: Finished) -> None:
        """Add one answer."""
        super().add(replace(finished, choice=finished.choice % self._num_choices))


async def _numbered(
    events: AsyncGenerator[Chunk | Finished, None], first: int
) -> AsyncGenerator[Chunk | Finished, None]:
    async with aclosing(events):
        async for event in events:
            yield replace(event, choice=event.choice + first)


def _reason(finished: Finished) -> str:
    return "length" if finished.finish_reason is FinishReason.LENGTH else "stop"
