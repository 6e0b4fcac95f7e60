"""What a generation hands to its client, and how tokens become that.

Knows nothing of gRPC or HTTP. Text is what is complete with the tokens so far; the stop token is
the last id and never text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actors.request_channel import Usage
from configs.ids import RequestId
from configs.numerics import FinishReason


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one engine step, or of several when the client reads slowly."""

    token_ids: tuple[int, ...]
    text: str
    """Complete characters only; empty without a tokenizer."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation; nothing follows."""

    finish_reason: FinishReason
    usage: Usage
    seed: int
    """Seed that was used, also for greedy requests."""
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Logits of consecutive prompt positions."""

    first_position: int
    logits: NDArray[np.float32]
    """`[rows, vocab]`, read-only."""


class Detokenizer(Protocol):
    """Turns tokens into text that never ends in half a character."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is complete with these tokens."""

    def finish(self) -> str:
        """Return what is left, incomplete bytes replaced."""


class AnswerShaper:
    """Makes chunks from the tokens of one request. One reader, in order.

    The first `resume_offset` tokens are not sent, nor is the text that was complete with them; the
    detokenizer still sees them, so that the rest reads as in the unbroken answer.
    """

    def __init__(
        self, *, detokenizer: Detokenizer | None, stop_ids: Collection[int], resume_offset: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_ids = frozenset(stop_ids)
        self._num_to_skip = resume_offset

    def push(self, token_ids: Sequence[int]) -> Chunk | None:
        """Return the chunk of new tokens; None when nothing is to be sent."""
        skipped, fresh = token_ids[: self._num_to_skip], token_ids[self._num_to_skip :]
        self._num_to_skip -= len(skipped)
        if skipped:
            self._text_of(skipped)
        if not fresh:
            return None
        return Chunk(token_ids=tuple(fresh), text=self._text_of(fresh))

    def finish(self) -> Chunk | None:
        """Return the chunk with text that was held back; None when there is none."""
        if self._detokenizer is None:
            return None
        text = self._detokenizer.finish()
        return Chunk(token_ids=(), text=text) if text and self._num_to_skip == 0 else None

    def _text_of(self, token_ids: Sequence[int]) -> str:
        if self._detokenizer is None:
            return ""
        # A stop token ends the request, so only the last token can be one.
        is_stopped = token_ids[-1] in self._stop_ids
        return self._detokenizer.push(token_ids[:-1] if is_stopped else token_ids)
