"""What a generation or a score hands to its client. Knows nothing of gRPC or HTTP.

Text is what is complete with the tokens so far; the stop token is the last id and never text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.request_channel import TokenLogprobs, Usage
from configs.ids import RequestId
from configs.numerics import FinishReason
from model.chat.values import ChatDelta


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one engine step, or of several when the client reads slowly."""

    token_ids: tuple[int, ...]
    text: str
    """Complete characters only; empty without a tokenizer and in a chat."""
    choice: int = 0
    """Which of the answers they belong to."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token id when they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of consecutive prompt tokens, in the first chunks of choice 0."""
    prompt_position: int = 0
    """Position of the first of `prompt_logprobs`."""
    deltas: tuple[ChatDelta, ...] = ()
    """What the text means, in a chat; text that may be a stop text is held back here too."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a generation; nothing follows."""

    finish_reason: FinishReason
    usage: Usage
    seed: int
    """Seed that was used, also for greedy requests."""
    request_id: RequestId
    choice: int = 0
    matched_stop: int | str | None = None
    """Stop token or stop text that ended it; None for its length or a complete constraint."""


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Logits of consecutive prompt positions."""

    first_position: int
    logits: NDArray[np.float32]
    """`[rows, vocab]`, read-only."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Says that the answer is an assistant's message in K3's chat format."""

    thinking: bool
    """The prompt ends inside the model's thinking."""
