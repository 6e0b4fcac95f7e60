"""Answers in the shape of OpenAI's API: whole ones and pieces of a stream, as plain dicts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.request_channel import TokenLogprobs
from cluster.api.answers import Chunk, Finished
from configs.numerics import FinishReason
from model.chat.values import ChatDelta, ReasoningDelta, TextDelta, ToolCallDelta

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all pieces of one answer have in common."""

    id: str
    model: str
    created: int

    @classmethod
    def make(cls, prefix: str, model: str) -> Envelope:
        """Return one with a fresh id."""
        return cls(f"{prefix}-{secrets.token_hex(12)}", model, int(time.time()))

    def wrap(
        self,
        kind: str,
        choices: Sequence[dict[str, Any]],
        **fields: Any,  # noqa: ANN401 - JSON
    ) -> dict[str, Any]:
        """Return an object of `kind` with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **fields,
        }


class UsageSum:
    """What the answers to one request cost together."""

    def __init__(self) -> None:
        """Nothing so far."""
        self._num_prompt = 0
        self._num_cached = 0
        self._num_output = 0

    def add(self, finished: Finished) -> None:
        """Add one answer; its prompt counts with choice 0."""
        usage = finished.usage
        self._num_output += usage.output_tokens
        if finished.choice == 0:
            self._num_prompt += usage.prompt_tokens
            self._num_cached += usage.prompt_tokens - usage.computed_tokens

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_output,
            "total_tokens": self._num_prompt + self._num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


class ChatTeller:
    """Tells chunks of a chat: deltas, log-probabilities and finish reasons."""

    def __init__(self, envelope: Envelope, token_bytes: TokenBytes, *, has_logprobs: bool) -> None:
        """Tell answers of one request.

        Args:
            envelope: Its id, whose calls are named after it.
            token_bytes: Bytes of a token.
            has_logprobs: Log-probabilities were asked for.
        """
        self._envelope = envelope
        self._token_bytes = token_bytes
        self._has_logprobs = has_logprobs
        self._called: set[int] = set()

    def deltas(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the deltas of a chunk, one per kind of content, in order."""
        told = [self._delta(chunk.choice, delta) for delta in chunk.deltas]
        if self._has_logprobs and chunk.token_ids and not told:
            told.append({"content": ""})
        return told

    def logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        """Return the log-probabilities of a chunk's tokens; None when not asked for."""
        if not self._has_logprobs:
            return None
        pairs = zip(chunk.token_ids, chunk.logprobs, strict=True)
        return {"content": [self._entry(token, logprobs) for token, logprobs in pairs]}

    def finish_reason(self, finished: Finished) -> str:
        """Return why an answer ended, in OpenAI's words."""
        if finished.finish_reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if finished.choice in self._called else "stop"

    def call(self, choice: int, delta: ToolCallDelta) -> dict[str, Any]:
        """Return a call as a message holds it."""
        self._called.add(choice)
        suffix = self._envelope.id.rpartition("-")[2]
        return {
            "id": f"call_{suffix}_{choice}_{delta.index}",
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }

    def _delta(self, choice: int, delta: ChatDelta) -> dict[str, Any]:
        match delta:
            case ReasoningDelta():
                return {"reasoning_content": delta.text}
            case TextDelta():
                return {"content": delta.text}
            case ToolCallDelta():
                return {"tool_calls": [{"index": delta.index, **self.call(choice, delta)}]}

    def _entry(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        tops = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return {
            **self._token(token_id, logprobs.logprob),
            "top_logprobs": [self._token(token, value) for token, value in tops],
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token_id)
        text = data.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}


@dataclass(slots=True)
class ChatMessageSum:
    """One whole message, from its chunks."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, chunk: Chunk, teller: ChatTeller) -> None:
        """Add a chunk."""
        for delta in chunk.deltas:
            match delta:
                case ReasoningDelta():
                    self.reasoning.append(delta.text)
                case TextDelta():
                    self.text.append(delta.text)
                case ToolCallDelta():
                    self.calls.append(teller.call(chunk.choice, delta))
        logprobs = teller.logprobs(chunk)
        if logprobs is not None:
            self.logprobs.extend(logprobs["content"])

    def as_json(self, index: int, *, has_logprobs: bool) -> dict[str, Any]:
        """Return the choice of a whole answer."""
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not text else text,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self.logprobs} if has_logprobs else None,
            "finish_reason": self.finish_reason,
        }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: of an impossible token the least one."""
    return max(logprob, -1e30)
