"""News of one accepted request on its way from a worker's connection to the one who reads it.

The buffer is bounded by credit: a worker may be at most `Submit.credit_tokens` tokens, or rows of a
score, ahead of the reader. Taking news never waits. The request is settled exactly once, by the
worker's `Ended`, by the loss of the connection, or by a reader that leaves first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from actors.request_channel import (
    ROW_GRID,
    Cancel,
    Credit,
    Ended,
    LogitRows,
    PromptLogprobs,
    Submit,
    TokenLogprobs,
    ToWorker,
    Usage,
    choice_id,
)
from cluster.api.status import error_of_code
from configs.errors import (
    DeadlineError,
    InvariantError,
    RequestCancelledError,
    ServingError,
)
from configs.ids import RequestId
from configs.numerics import EndReason, FinishReason

CREDIT_TOKENS: Final = 256
"""Tokens that a worker may be ahead of the reader. Far more than a round trip's worth of steps, and
all that is computed for nothing when a client vanishes unseen."""
ROW_WINDOW_BYTES: Final = 8 << 20
"""Logits that a worker may be ahead of the reader of a score, unless `ROW_GRID` rows are more."""


def row_window(vocab_size: int) -> int:
    """Rows of a score that a worker may be ahead of the reader: a multiple of `ROW_GRID`."""
    num_rows = ROW_WINDOW_BYTES // (vocab_size * 4)
    return max(ROW_GRID, num_rows - num_rows % ROW_GRID)


class RequestKey(NamedTuple):
    """Names one worker's try at a request."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended."""

    reason: EndReason
    usage: Usage
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    """Set unless `reason` is FINISHED."""


@dataclass(slots=True)
class News:
    """What came since the last look. `outcome` is set in the last one."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token id when they were asked for."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    rows: list[LogitRows] = field(default_factory=list)
    outcome: Outcome | None = None


class RequestStream:
    """One request between the connection that fills it and the reader that empties it.

    Args:
        submit: What was sent to the worker. Its `credit_tokens` is how far the worker may be ahead
            of the reader; for a score a multiple of `ROW_GRID`.
        choice: Which of the submission's answers this stream is.
        post: Sends a message to the worker; does nothing once the connection is gone.
        on_settled: Called once, with the outcome.
        on_closed: Called once, when the reader has left.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        choice: int = 0,
        post: Callable[[ToWorker], None],
        on_settled: Callable[[Outcome], None],
        on_closed: Callable[[RequestStream], None],
    ) -> None:
        self.choice = choice
        self.key = RequestKey(choice_id(submit.request_id, choice), submit.attempt)
        self.seed = submit.sampling.seed
        self._num_prompt = len(submit.token_ids)
        self._is_score = submit.want_logits
        self._num_due = len(submit.token_ids) if submit.want_logits else submit.max_tokens
        self._window = submit.credit_tokens
        self._credit_grain = ROW_GRID if submit.want_logits else 1
        self._post = post
        self._on_settled = on_settled
        self._on_closed = on_closed
        self._news = News()
        self._outcome: Outcome | None = None
        self._is_closed = False
        self._is_complete = False
        self._num_received = 0
        self._num_granted = submit.credit_tokens
        self._num_read = 0
        self._arrived = asyncio.Event()

    # The connection's side

    def put_tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Take tokens from the worker. A worker that ignores its credit fails the request."""
        if self._has_taken(len(token_ids), "tokens"):
            self._news.token_ids.extend(token_ids)
            self._news.logprobs.extend(logprobs)

    def put_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take log-probabilities of the prompt: bounded by its length, so they need no credit."""
        if self._outcome is None:
            self._news.prompt_logprobs.append(logprobs)
            self._arrived.set()

    def put_rows(self, rows: LogitRows) -> None:
        """Take logit rows. A worker that ignores its credit fails the request."""
        if self._has_taken(rows.num_rows, "rows"):
            self._news.rows.append(rows)

    def put_end(self, ended: Ended) -> None:
        """Take the worker's end of the request."""
        outcome = _outcome_of(ended)
        self._settle(self._completed(outcome) if self._is_complete else outcome)

    def fail(self, error: ServingError) -> None:
        """End the request with an error and stop the worker. Nothing happens if it has ended."""
        if self._outcome is None:
            if self._is_complete:
                self._settle(self._completed(Outcome(EndReason.FAILED, self._own_usage())))
                return
            self._post(Cancel(*self.key))
            self._settle(Outcome(EndReason.FAILED, self._own_usage(), error=error))

    # The reader's side

    @property
    def outcome(self) -> Outcome | None:
        """How the request ended; None while it runs."""
        return self._outcome

    async def next_news(self) -> News:
        """Wait for news and take all of it; not to be called again after the outcome.

        Calling it again says that the last news is out of the way: credit is granted for it.
        """
        self._grant()
        await self._arrived.wait()
        self._arrived.clear()
        news, self._news = self._news, News()
        news.outcome = self._outcome
        self._num_read += len(news.token_ids) + sum(rows.num_rows for rows in news.rows)
        return news

    def complete(self) -> None:
        """Say that the answer is whole though the worker goes on: it is stopped.

        What it still sends is of no use; its end, whatever it says, is a finished answer's.
        """
        if self._outcome is None and not self._is_complete:
            self._is_complete = True
            self._post(Cancel(*self.key))

    def close(self, *, is_late: bool = False) -> None:
        """Leave. A request that still runs is cancelled at the worker. Idempotent.

        Args:
            is_late: The client's deadline has passed, which is why the reader leaves.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._outcome is None and self._is_complete:
            self._settle(self._completed(Outcome(EndReason.CANCELLED, self._own_usage())))
        if self._outcome is None:
            self._post(Cancel(*self.key))
            reason, error = _leaving(self.key.request_id, is_late=is_late)
            self._settle(Outcome(reason, self._own_usage(), error=error))
        self._news = News()
        self._on_closed(self)

    def _has_taken(self, num_new: int, what: str) -> bool:
        """Count what arrived; False if it is of no use, because it is late or beyond the credit."""
        if self._outcome is not None:
            return False
        self._num_received += num_new
        if self._num_received > self._num_granted:
            self.fail(
                InvariantError(
                    f"request {self.key.request_id}: the worker sent {self._num_received} {what}, "
                    f"{self._num_granted} were granted; its version may differ from the gateway's"
                )
            )
            return False
        self._arrived.set()
        return True

    def _grant(self) -> None:
        if self._outcome is not None or self._is_complete:
            return
        goal = self._num_read + self._window
        goal -= goal % self._credit_grain
        num_wanted = min(goal, self._num_due) - self._num_granted
        # In large pieces: one message per many steps.
        is_last_piece = goal >= self._num_due
        if num_wanted > 0 and (num_wanted >= self._window // 4 or is_last_piece):
            self._num_granted += num_wanted
            self._post(Credit(*self.key, num_tokens=num_wanted))

    def _completed(self, outcome: Outcome) -> Outcome:
        usage = outcome.usage
        if not usage.prompt_tokens:  # the worker has not told
            usage = msgspec.structs.replace(usage, prompt_tokens=self._num_prompt)
        return Outcome(EndReason.FINISHED, usage, FinishReason.STOP)

    def _own_usage(self) -> Usage:
        return Usage(output_tokens=0 if self._is_score else self._num_received)

    def _settle(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._arrived.set()
        self._on_settled(outcome)


def _leaving(request_id: RequestId, *, is_late: bool) -> tuple[EndReason, ServingError]:
    if is_late:
        return EndReason.DEADLINE, DeadlineError(f"request {request_id}: its deadline passed")
    return EndReason.CANCELLED, RequestCancelledError(f"request {request_id}: the client left")


def _outcome_of(ended: Ended) -> Outcome:
    name, text = ended.request_id, ended.error_message
    error: ServingError | None
    match ended.reason:
        case EndReason.FINISHED:
            error = None
        case EndReason.CANCELLED:
            error = RequestCancelledError(text if text else f"request {name} was cancelled")
        case EndReason.DEADLINE:
            cost = f"{ended.usage.total_s:.3f} s and {ended.usage.output_tokens} tokens"
            late = f"request {name}: its deadline passed after {cost}"
            error = DeadlineError(text if text else late)
        case EndReason.REJECTED | EndReason.FAILED:
            error = error_of_code(ended.error_code, text)
    return Outcome(ended.reason, ended.usage, ended.finish_reason, error)
