"""One request inside the engine: what is known of it, what is in memory, what it owns.

Mutable, owned by the engine thread, never handed out. Tokens are `prompt + generated`; the first
`computed` of them are in the model's memory. A request of which only the last token, a generated
one, is not in memory decodes: that token is fed and gives the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from actors.engine.choosing import TokenChoice
from actors.request_channel import Submit, Usage
from configs.ids import RequestId
from configs.numerics import FinishReason


class RequestKey(NamedTuple):
    """Names one worker's try at a request."""

    request_id: RequestId
    attempt: int


class Phase(StrEnum):
    """Where a request is in its life."""

    QUEUED = "queued"
    """Owns no memory yet."""
    PREFILL = "prefill"
    """Its prompt, or tokens of an earlier attempt, are being computed."""
    DECODE = "decode"
    """Every token but the last is in memory."""
    ENDED = "ended"
    """Owns nothing; its `Ended` is made."""


@dataclass(slots=True)
class EngineRequest:
    """State of one (request, attempt). Times are `time.monotonic()` seconds of this process."""

    submit: Submit
    """Of this answer alone: one choice."""
    arrived_at: float
    num_blocks: int
    """Blocks that it can need at most; reserved as a whole at admission."""
    choice: TokenChoice
    deadline: float | None
    credit: int
    """Tokens that it may still generate, or rows that a score may still compute."""
    generated: list[int] = field(default_factory=list)
    """Tokens after the prompt, those of earlier attempts first. A stop token is the last one."""
    computed: int = 0
    blocks: tuple[int, ...] = ()
    slot: int | None = None
    is_ended: bool = False
    last_step: int = 0
    """Step that computed something of it last."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    leader: EngineRequest | None = None
    """Computes the prompt for this one, which waits for it; None once it does not."""
    followers: list[EngineRequest] = field(default_factory=list)
    """Requests whose `leader` this one is, live ones only."""
    num_shared: int = 0
    """Prompt tokens in memory that another request has computed."""

    @property
    def key(self) -> RequestKey:
        """Name of the request."""
        return RequestKey(self.submit.request_id, self.submit.attempt)

    @property
    def phase(self) -> Phase:
        """Where it is in its life."""
        if self.is_ended:
            return Phase.ENDED
        if self.slot is None:
            return Phase.QUEUED
        has_answer = len(self.generated) > 0
        return Phase.DECODE if has_answer and self.computed == self.num_known - 1 else Phase.PREFILL

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.submit.token_ids)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.submit.token_ids) + len(self.generated)

    @property
    def needs_token(self) -> bool:
        """Whether every known token is in memory, so that the next one can be chosen."""
        return not self.submit.want_logits and self.computed == self.num_known

    @property
    def is_paused(self) -> bool:
        """Whether it waits for credit, or for its leader to have computed the prompt."""
        return self.credit <= 0 or self.leader is not None

    def tokens(self, position: int, num_tokens: int) -> list[int]:
        """Return `num_tokens` known tokens from `position` on."""
        num_prompt = self.num_prompt
        end = position + num_tokens
        if end <= num_prompt:
            return self.submit.token_ids[position:end]
        if position >= num_prompt:
            return self.generated[position - num_prompt : end - num_prompt]
        return self.submit.token_ids[position:] + self.generated[: end - num_prompt]

    def take_progress(self, num_tokens: int, step: int) -> None:
        """Note that `num_tokens` more tokens are in memory since `step`; a score pays for them."""
        self.computed += num_tokens
        self.last_step = step
        if self.submit.want_logits:
            self.credit -= num_tokens

    def append_token(self, token: int, now: float) -> None:
        """Add a token that was sampled at `now`.

        Raises:
            InvariantError: The request's grammar does not allow it.
        """
        self.choice.append(token)
        self.generated.append(token)
        self.credit -= 1
        if self.first_token_at is None:
            self.first_token_at = now

    def find_finish(self) -> FinishReason | None:
        """Return why the tokens so far are a finished answer, or None."""
        if self.submit.want_logits:
            return None
        if self.generated and self.generated[-1] in self.submit.stop_token_ids:
            return FinishReason.STOP
        if self.choice.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= self.submit.max_tokens else None

    def usage(self, now: float) -> Usage:
        """What it has cost until `now`. `output_tokens` includes those of earlier attempts."""
        admitted_at = now if self.admitted_at is None else self.admitted_at
        first_token_s = (
            0.0 if self.first_token_at is None else self.first_token_at - self.arrived_at
        )
        return Usage(
            prompt_tokens=self.num_prompt,
            computed_tokens=max(min(self.computed, self.num_prompt) - self.num_shared, 0),
            output_tokens=len(self.generated),
            queue_s=admitted_at - self.arrived_at,
            first_token_s=first_token_s,
            total_s=now - self.arrived_at,
        )
