"""From the tokens of one answer to the chunks that its client gets.

Tokens are taken one by one, so that chunks joined are the same however tokens arrive: text and
deltas in order, token ids in step with their text. Text that may become a stop text waits, and the
ids of its tokens wait with it. After a stop text nothing more is shown; the ids of the tokens that
it was made of are, because they were generated and count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from actors.request_channel import PromptLogprobs, TokenLogprobs, Usage
from cluster.api.answers import Chunk, Finished
from cluster.api.stop_scanner import StopScanner, StopTexts
from configs.errors import InvariantError
from configs.ids import RequestId
from configs.numerics import FinishReason
from model.chat.values import ChatDelta, ReasoningDelta, TextDelta
from model.tokenizer import IncrementalDetokenizer


class TokenReader(Protocol):
    """Says what tokens mean. Never ends in half a character."""

    def push(self, token_id: int) -> Sequence[ChatDelta]:
        """Return what is complete with this token."""

    def finish(self) -> Sequence[ChatDelta]:
        """Return what is left."""


class PlainReader:
    """Reads all tokens as visible text."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer

    def push(self, token_id: int) -> Sequence[ChatDelta]:
        """See `TokenReader`."""
        text = self._detokenizer.push((token_id,))
        return (TextDelta(text),) if text else ()

    def finish(self) -> Sequence[ChatDelta]:
        """See `TokenReader`."""
        text = self._detokenizer.finish()
        return (TextDelta(text),) if text else ()


@dataclass(slots=True)
class _Fresh:
    """What the next chunk takes."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    deltas: list[ChatDelta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Held:
    """A token that waits for its text."""

    token_id: int
    logprobs: TokenLogprobs | None
    text_end: int
    """Characters of visible text that must be out first."""


class AnswerShaper:
    """Makes chunks from the tokens of one answer. One reader, in order.

    The first `resume_offset` tokens are not sent, nor is the text that was complete with them; they
    are still read, so that the rest reads as in the unbroken answer.
    """

    def __init__(
        self,
        reader: TokenReader | None,
        *,
        stop_ids: Collection[int] = (),
        stop_texts: StopTexts | None = None,
        min_tokens: int = 0,
        includes_stop_text: bool = False,
        choice: int = 0,
        resume_offset: int = 0,
        is_chat: bool = False,
    ) -> None:
        """Shape one answer.

        Args:
            reader: Reads tokens; None gives ids without text.
            stop_ids: Tokens that end the answer and are no text.
            stop_texts: Looked for in the visible text; None has none.
            min_tokens: A stop text that is complete before so many tokens is plain text.
            includes_stop_text: The stop text that ends the answer is shown.
            choice: Which answer it is.
            resume_offset: Tokens that the client holds already.
            is_chat: Chunks carry deltas in place of text.
        """
        self._reader = reader
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = min_tokens
        self._scanner = StopScanner(
            StopTexts() if stop_texts is None else stop_texts, is_included=includes_stop_text
        )
        self._choice = choice
        self._resume_offset = resume_offset
        self._is_chat = is_chat
        self._num_tokens = 0
        self.last_token: int | None = None
        """Last token of the answer so far."""
        self._num_read = 0
        self._num_shown = 0
        self._num_to_hide = 0
        self._held: deque[_Held] = deque()
        self._fresh = _Fresh()

    @property
    def matched(self) -> str | None:
        """The stop text that ended the answer; None while there is none."""
        return self._scanner.matched

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far; those after a stop text are none."""
        return self._num_tokens

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> Chunk | None:
        """Return the chunk that new tokens make; None when nothing is to be sent.

        Args:
            token_ids: In order.
            logprobs: One per token, or none.
        """
        for index, token_id in enumerate(token_ids):
            if self._scanner.matched is not None:
                break
            self._take(token_id, logprobs[index] if logprobs else None)
        return self._chunk()

    def finish(self) -> Chunk | None:
        """Return the chunk of what was held back; None when there is none. The answer has ended."""
        if self._scanner.matched is None and self._reader is not None:
            self._read(self._reader.finish())
        if self._scanner.matched is None:
            self._show_text(self._scanner.flush())
        self._release_tokens()
        return self._chunk()

    def end(
        self,
        finish_reason: FinishReason | None,
        usage: Usage,
        *,
        seed: int,
        request_id: RequestId,
    ) -> Finished:
        """Return the end of the answer, after `finish`.

        Args:
            finish_reason: What its worker says; a stop text that was found overrules it.
            usage: What its worker says; the worker may have gone on behind a stop text.
            seed: That was used.
            request_id: Name of the request.

        Raises:
            InvariantError: It finished without a reason.
        """
        matched: int | str | None = self.matched
        if matched is not None:
            finish_reason = FinishReason.STOP
        elif finish_reason is FinishReason.STOP and self.last_token in self._stop_ids:
            matched = self.last_token
        if finish_reason is None:
            raise InvariantError(f"request {request_id} finished without a reason")
        return Finished(
            finish_reason=finish_reason,
            usage=msgspec.structs.replace(usage, output_tokens=self._num_tokens),
            seed=seed,
            request_id=request_id,
            choice=self._choice,
            matched_stop=matched,
        )

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._num_tokens += 1
        self.last_token = token_id
        if self._reader is not None and token_id not in self._stop_ids:
            self._read(self._reader.push(token_id))
        if self._num_tokens <= self._resume_offset:
            self._num_to_hide = self._num_read
            return
        self._held.append(_Held(token_id, logprobs, self._num_read))
        self._release_tokens()

    def _read(self, deltas: Sequence[ChatDelta]) -> None:
        for delta in deltas:
            if isinstance(delta, TextDelta):
                self._num_read += len(delta.text)
                can_stop = self._num_tokens >= self._min_tokens
                self._show_text(self._scanner.push(delta.text, can_stop=can_stop))
                if self._scanner.matched is not None:
                    return
            else:
                # A stop text lies within the visible text: what comes after is no part of it.
                self._show_text(self._scanner.flush())
                if self._num_tokens > self._resume_offset:
                    self._fresh.deltas.append(delta)

    def _show_text(self, text: str) -> None:
        hidden = max(self._num_to_hide - self._num_shown, 0)
        self._num_shown += len(text)
        if self._num_tokens <= self._resume_offset:
            return
        if text[hidden:]:
            self._fresh.deltas.append(TextDelta(text[hidden:]))

    def _release_tokens(self) -> None:
        is_over = self._scanner.matched is not None
        while self._held and (is_over or self._held[0].text_end <= self._num_shown):
            held = self._held.popleft()
            self._fresh.token_ids.append(held.token_id)
            if held.logprobs is not None:
                self._fresh.logprobs.append(held.logprobs)

    def _chunk(self) -> Chunk | None:
        fresh = self._fresh
        if not fresh.token_ids and not fresh.deltas:
            return None
        self._fresh = _Fresh()
        texts = (delta.text for delta in fresh.deltas if isinstance(delta, TextDelta))
        return Chunk(
            token_ids=tuple(fresh.token_ids),
            text="" if self._is_chat else "".join(texts),
            choice=self._choice,
            logprobs=tuple(fresh.logprobs),
            deltas=tuple(_joined(fresh.deltas)) if self._is_chat else (),
        )


def prompt_chunk(logprobs: PromptLogprobs) -> Chunk:
    """Return the chunk that tells log-probabilities of a prompt."""
    return Chunk(
        token_ids=(),
        text="",
        prompt_logprobs=tuple(logprobs.logprobs),
        prompt_position=logprobs.first_position,
    )


def _joined(deltas: Sequence[ChatDelta]) -> list[ChatDelta]:
    """Join neighbours of one kind, so that a coalesced chunk is one message."""
    joined: list[ChatDelta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, TextDelta) and isinstance(last, TextDelta):
            joined[-1] = TextDelta(last.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(last, ReasoningDelta):
            joined[-1] = ReasoningDelta(last.text + delta.text)
        else:
            joined.append(delta)
    return joined
