"""One request inside the engine: what is known of it, what is in memory, what it owns.

Mutable, owned by the engine thread, never handed out. Tokens are `prompt + generated`; the first
`computed` of them are in the model's memory. A request of which only the last token, a generated
one, is not in memory decodes: that token is fed and gives the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.engine.choosing import TokenChoice
from actors.engine.prefix_index import PrefixSnapshot
from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import PRIORITY_WAIT_S, ROW_GRID, Submit, Usage
from configs.ids import RequestId
from configs.numerics import FinishReason


class RequestKey(NamedTuple):
    """Names one worker's try at a request."""

    request_id: RequestId
    attempt: int


class Rank(NamedTuple):
    """Order of service; unique on a worker."""

    time: float
    """Arrival, moved by the priority."""
    number: int


class Phase(StrEnum):
    """Where a request is in its life."""

    QUEUED = "queued"
    """Owns no memory: not yet, or not any more because it was preempted."""
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
    number: int
    """Of the submissions of this worker; breaks ties of rank."""
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
    """Step that computed something of it last, or admitted it."""
    peak_computed: int = 0
    """Most tokens that were in memory before it was preempted."""
    last_saved: int = 0
    """Position of the last prefix snapshot that it left or came from."""
    num_reported: int = 0
    """Prompt positions whose rows were reported; for those who want rows."""
    num_copied: int = 0
    """Tokens in the last copy that has left this worker."""
    snapshot: RequestSnapshot | None = None
    """Copy of its memory that it comes back from when it is admitted again."""
    hit: PrefixSnapshot | None = None
    """Where it would go on if it were admitted now."""
    hit_version: int = -1
    """Version of the prefix index that `hit` is of."""
    is_leaving: bool = False
    """A copy of it is on its way to another worker; nothing is computed meanwhile."""
    admitted_at: float | None = None
    first_token_at: float | None = None
    leader: EngineRequest | None = None
    """Computes the prompt for this one, which waits for it; None once it does not."""
    followers: list[EngineRequest] = field(default_factory=list)
    """Requests whose `leader` this one is, live ones only."""
    num_shared: int = 0
    """Prompt tokens in memory that another request has computed."""
    prompt_ids_T: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        """Keep the prompt as an array too."""
        self.prompt_ids_T = np.asarray(self.submit.token_ids, dtype=np.int32)

    @property
    def key(self) -> RequestKey:
        """Name of the request."""
        return RequestKey(self.submit.request_id, self.submit.attempt)

    @property
    def rank(self) -> Rank:
        """Requests of lower rank are served before it; never changes."""
        return Rank(self.arrived_at + self.submit.priority * PRIORITY_WAIT_S, self.number)

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
        """Whether it waits for credit, for its leader's prompt, or to leave this worker."""
        return self.leader is not None or self.is_leaving or not self._has_credit

    @property
    def _has_credit(self) -> bool:
        """Whether its credit is enough for a token, or for a score to end its next chunk."""
        if not self.submit.want_logits:
            return self.credit > 0
        reach = min(self.row_limit, self.num_prompt)
        return (reach if reach == self.num_prompt else reach - reach % ROW_GRID) > self.num_reported

    @property
    def wants_rows(self) -> bool:
        """Whether rows of its prompt are still to be reported."""
        submit = self.submit
        wants = submit.want_logits or submit.prompt_logprobs is not None
        return wants and self.num_reported < self.num_prompt

    @property
    def row_limit(self) -> int:
        """Prompt positions that may be computed: those a score has credit for, else all."""
        if not self.submit.want_logits:
            return self.num_prompt
        return self.num_reported + max(self.credit, 0)

    @property
    def reuse_limit(self) -> int:
        """Tokens that may come from a prefix: not the last one, nor any whose row is wanted."""
        return self.num_reported if self.wants_rows else self.num_known - 1

    @property
    def num_start_tokens(self) -> int:
        """Tokens that it is given blocks for when it is admitted: the known ones and the next."""
        return min(self.num_known + 1, self.num_prompt + max(self.submit.max_tokens, 0))

    def tokens(self, position: int, num_tokens: int) -> list[int]:
        """Return `num_tokens` known tokens from `position` on."""
        num_prompt = self.num_prompt
        end = position + num_tokens
        if end <= num_prompt:
            return self.submit.token_ids[position:end]
        if position >= num_prompt:
            return self.generated[position - num_prompt : end - num_prompt]
        return self.submit.token_ids[position:] + self.generated[: end - num_prompt]

    def forms(self, num_tokens: int, *, are_forms_distinct: bool) -> NDArray[np.int32]:
        """Return the first known tokens as the prefix index names them.

        Args:
            num_tokens: How many.
            are_forms_distinct: Negate those of the answer, which decode computes.
        """
        num_prompt = self.num_prompt
        if num_tokens <= num_prompt:
            return self.prompt_ids_T[:num_tokens]
        answer = np.asarray(self.generated[: num_tokens - num_prompt], dtype=np.int32)
        return np.concatenate([self.prompt_ids_T, ~answer if are_forms_distinct else answer])

    def take_progress(self, num_tokens: int, step: int) -> int:
        """Note that `num_tokens` more tokens are in memory since `step`.

        Returns:
            How many of the first of them had their rows reported before, by an earlier
            computation. A score pays for the others.
        """
        old = self.computed
        self.computed += num_tokens
        self.last_step = step
        if not self.wants_rows:
            return num_tokens
        num_old = min(max(self.num_reported - old, 0), num_tokens)
        self.num_reported = max(self.num_reported, self.computed)
        if self.submit.want_logits:
            self.credit -= num_tokens - num_old
        return num_old

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
        num_computed = max(self.computed, self.peak_computed)
        first_token_s = (
            0.0 if self.first_token_at is None else self.first_token_at - self.arrived_at
        )
        return Usage(
            prompt_tokens=self.num_prompt,
            computed_tokens=max(min(num_computed, self.num_prompt) - self.num_shared, 0),
            output_tokens=len(self.generated),
            queue_s=admitted_at - self.arrived_at,
            first_token_s=first_token_s,
            total_s=now - self.arrived_at,
        )
