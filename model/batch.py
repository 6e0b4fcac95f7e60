"""What one step computes: the tokens of several requests, flattened, and where their memory lies.

Frozen. Made by the engine, read by the decoder. Tensors are on the model's device.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request in a step."""

    start: int
    """First row of the segment on the flattened token axis."""
    num_tokens: int
    position: int
    """Absolute position of the first token in its request; equals the tokens already in memory."""
    is_decode: bool
    """Use the decode form (absorbed MLA, recurrent KDA) instead of the prefill form.

    The form is a property of the token (prompt or generated), never of the chunk's length, so that
    under invariant numerics a prompt gives the same bits however it is split.
    """
    state_slot: int
    """Row of the KDA state and conv state pools."""
    block_table: tuple[int, ...]
    """MLA blocks of the request, in order; covers at least `position + num_tokens` tokens."""
    save_slot: int | None = None
    """The state after the last token is copied there too. Prefill only: a request may go on in the
    next segment of the same lane, from which its state could not be told apart afterwards."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one lane of one step."""

    token_ids_T: Tensor
    """int64 `[T]`; the segments tile it without gaps, in order."""
    segments: tuple[Segment, ...]
    logit_rows_R: Tensor
    """int64 `[R]`: rows of the token axis whose logits are wanted."""
