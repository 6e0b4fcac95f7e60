"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from cluster.api.answers import ChatFormat, Chunk, Finished
from cluster.api.inference import CallContext, Inference
from cluster.api.openai.answers import ChatMessageSum, ChatTeller, Envelope, UsageSum
from cluster.api.openai.chat_fields import ChatRequest
from cluster.api.params import GenerateParams
from configs.errors import InvalidRequestError
from model.chat.grammar import chat_constraint
from model.chat.values import Conversation
from model.constraint import Constraint

CHUNK = "chat.completion.chunk"


class ChatCompletion:
    """One request, from its fields to its answer."""

    def __init__(self, inference: Inference, wanted: ChatRequest, call: CallContext) -> None:
        """Answer `wanted`; nothing is done before `start`."""
        self._inference = inference
        self._wanted = wanted
        self._call = call
        self._has_logprobs = wanted.num_logprobs is not None
        self._envelope = Envelope.make("chatcmpl", inference.limits.model_name)
        self._teller = ChatTeller(
            self._envelope, inference.token_bytes, has_logprobs=self._has_logprobs
        )

    async def start(self) -> AsyncGenerator[Chunk | Finished, None]:
        """Return the events of the answer.

        Raises:
            AdmissionError: The request makes no sense; the rest is found with the first event.
        """
        wanted = self._wanted
        wanted.check_stream()
        conversation = wanted.to_conversation()
        params = GenerateParams(
            prompt=await self._inference.encode_chat(conversation),
            model=wanted.model,
            max_tokens=wanted.token_limit,
            sampling=wanted.sampling_params(),
            stop=wanted.stop_params(),
            num_choices=wanted.n or 1,
            constraint=self._constraint(conversation),
            logprobs=wanted.num_logprobs,
            priority=wanted.priority,
        )
        return self._inference.generate(params, self._call, chat=ChatFormat(wanted.thinking))

    async def whole(self, events: AsyncGenerator[Chunk | Finished, None]) -> dict[str, Any]:
        """Return the answer as one object."""
        sums = [ChatMessageSum() for _ in range(self._wanted.n or 1)]
        usage = UsageSum()
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Chunk):
                    sums[event.choice].add(event, self._teller)
                else:
                    usage.add(event)
                    sums[event.choice].finish_reason = self._teller.finish_reason(event)
        choices = [
            one.as_json(index, has_logprobs=self._has_logprobs) for index, one in enumerate(sums)
        ]
        return self._envelope.wrap("chat.completion", choices, usage=usage.as_json())

    async def pieces(
        self, events: AsyncGenerator[Chunk | Finished, None]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream."""
        usage = UsageSum()
        begun: set[int] = set()
        async with aclosing(events):
            async for event in events:
                if event.choice not in begun:
                    begun.add(event.choice)
                    yield self._piece(event.choice, {"role": "assistant", "content": ""})
                if isinstance(event, Finished):
                    usage.add(event)
                    reason = self._teller.finish_reason(event)
                    yield self._piece(event.choice, {}, finish_reason=reason)
                    continue
                logprobs = self._teller.logprobs(event)
                for delta in self._teller.deltas(event):
                    yield self._piece(event.choice, delta, logprobs=logprobs)
                    logprobs = None
        if self._wanted.wants_usage:
            yield self._envelope.wrap(CHUNK, (), usage=usage.as_json())

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if self._wanted.wants_usage:
            return self._envelope.wrap(CHUNK, (choice,), usage=None)
        return self._envelope.wrap(CHUNK, (choice,))

    def _constraint(self, conversation: Conversation) -> Constraint | None:
        constraint = chat_constraint(conversation)
        if self._wanted.structured_outputs is None:
            return constraint
        if constraint is not None or conversation.thinking:
            raise InvalidRequestError(
                "structured_outputs constrains the answer from its first token on: turn thinking "
                "off (reasoning_effort none), and leave response_format and forced tools out; or "
                "use response_format"
            )
        return self._wanted.structured_outputs.to_constraint()
