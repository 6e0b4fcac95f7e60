"""News of one accepted request on its way from the workers' connections to the one who reads it.

The buffer is bounded by credit: a worker may be at most `Submit.credit_tokens` tokens, or rows of a
score, ahead of the reader. Taking news never waits. A request that leaves its worker goes on where
it is attached next; the reader sees one answer. It is settled exactly once: by a worker's `Ended`,
by the loss of its worker where no other takes it, or by a reader that leaves first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec

from actors.request_channel import (
    ROW_GRID,
    Cancel,
    Credit,
    Ended,
    LogitRows,
    PromptLogprobs,
    SnapshotPlace,
    Submit,
    TokenLogprobs,
    ToWorker,
    Usage,
)
from cluster.api.request_outcome import Outcome, leaving, outcome_of
from cluster.api.request_progress import RequestProgress, choice_submit
from configs.errors import DeadlineError, InvariantError, ServingError
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
        submit: What was sent to the first worker. Its `credit_tokens` is how far a worker may be
            ahead of the reader; for a score a multiple of `ROW_GRID`.
        choice: Which of the submission's answers this stream is.
        post: Sends a message to that worker; does nothing once the connection is gone.
        on_settled: Called once, with the outcome.
        on_closed: Called once, when the reader has left.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        choice: int = 0,
        post: Callable[[ToWorker], None],
        on_settled: Callable[[Outcome], None],
        on_closed: Callable[[RequestStream], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.choice = choice
        self.seed = submit.sampling.seed
        self._progress = RequestProgress(choice_submit(submit, choice), clock=clock)
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
        self._is_detached = False
        self._num_read = 0
        self._arrived = asyncio.Event()

    @property
    def key(self) -> RequestKey:
        """Names the current attempt."""
        submit = self._progress.submit
        return RequestKey(submit.request_id, submit.attempt)

    # The connection's side

    def put_tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Take tokens from the worker. A worker that ignores its credit fails the request."""
        if self._outcome is None:
            self._progress.take_tokens(token_ids)
            if self._keeps_credit("tokens"):
                self._news.token_ids.extend(token_ids)
                self._news.logprobs.extend(logprobs)

    def put_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Take log-probabilities of the prompt: bounded by its length, so they need no credit."""
        if self._outcome is not None:
            return
        fresh = self._progress.take_prompt_logprobs(logprobs)
        if fresh is not None:
            self._news.prompt_logprobs.append(fresh)
            self._arrived.set()

    def put_rows(self, rows: LogitRows) -> None:
        """Take logit rows, those that an earlier attempt brought left out.

        A worker that ignores its credit fails the request.
        """
        if self._outcome is not None:
            return
        fresh = self._progress.take_rows(rows)
        if fresh is not None and self._keeps_credit("rows"):
            self._news.rows.append(fresh)

    def put_snapshot(self, place: SnapshotPlace) -> None:
        """Note where the next attempt can find the memory of this one."""
        self._progress.snapshot = place

    def put_end(self, ended: Ended) -> None:
        """Take the worker's end of the request; not `MOVED`, which ends an attempt only."""
        outcome = replace(outcome_of(ended), usage=self._progress.whole_usage(ended.usage))
        self._settle(self._completed(outcome) if self._is_complete else outcome)

    def fail(self, error: ServingError) -> None:
        """End the request with an error and stop the worker. Nothing happens if it has ended."""
        if self._outcome is None:
            if self._is_complete:
                self._settle(self._completed(Outcome(EndReason.FAILED, self._own_usage())))
                return
            self._post(Cancel(*self.key))
            self._settle(Outcome(EndReason.FAILED, self._own_usage(), error=error))

    # Between two workers

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer that a worker has to have room for."""
        return self._num_prompt + self._progress.submit.max_tokens

    @property
    def token_ids(self) -> list[int]:
        """The prompt."""
        return self._progress.submit.token_ids

    @property
    def snapshot(self) -> SnapshotPlace | None:
        """Where the last copy of the request's memory lies."""
        return self._progress.snapshot

    @property
    def time_left_s(self) -> float | None:
        """Seconds left of the client's deadline; None has none."""
        return self._progress.time_left_s

    @property
    def needs_worker(self) -> bool:
        """Whether something of the answer is still to come, and wanted."""
        return self._outcome is None and not self._is_complete

    def detach(self, usage: Usage) -> None:
        """Leave the current worker, which cost `usage` and hears nothing more."""
        self._progress.leave(usage)
        self._is_detached = True
        self._post = _post_nothing

    def attach(self, post: Callable[[ToWorker], None], *, takes_snapshot: bool) -> Submit:
        """Go on at another worker, as the next attempt.

        Args:
            post: Sends a message to it; does nothing once the connection is gone.
            takes_snapshot: Whether the last snapshot can still be there.

        Returns:
            What to send to it.
        """
        self._is_detached = False
        self._post = post
        return self._progress.begin_attempt(takes_snapshot=takes_snapshot)

    def expire(self) -> None:
        """End the request because its deadline passed while no worker had it."""
        late = f"request {self.key.request_id}: its deadline passed while it waited for a worker"
        self._settle(Outcome(EndReason.DEADLINE, self._own_usage(), error=DeadlineError(late)))

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
            if self._is_detached:
                self._settle(self._completed(Outcome(EndReason.CANCELLED, self._own_usage())))

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
            reason, error = leaving(self.key.request_id, is_late=is_late)
            self._settle(Outcome(reason, self._own_usage(), error=error))
        self._news = News()
        self._on_closed(self)

    def _keeps_credit(self, what: str) -> bool:
        """Look at what has just arrived; False if it is beyond the credit."""
        num_received, num_granted = self._progress.num_received, self._progress.num_granted
        if num_received > num_granted:
            self.fail(
                InvariantError(
                    f"request {self.key.request_id}: the worker sent {num_received} {what}, "
                    f"{num_granted} were granted; its version may differ from the gateway's"
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
        num_wanted = min(goal, self._num_due) - self._progress.num_granted
        # In large pieces: one message per many steps.
        is_last_piece = goal >= self._num_due
        if num_wanted > 0 and (num_wanted >= self._window // 4 or is_last_piece):
            self._progress.num_granted += num_wanted
            self._post(Credit(*self.key, num_tokens=num_wanted))

    def _completed(self, outcome: Outcome) -> Outcome:
        usage = outcome.usage
        if not usage.prompt_tokens:  # the worker has not told
            usage = msgspec.structs.replace(usage, prompt_tokens=self._num_prompt)
        return Outcome(EndReason.FINISHED, usage, FinishReason.STOP)

    def _own_usage(self) -> Usage:
        return Usage(output_tokens=0 if self._is_score else self._progress.num_received)

    def _settle(self, outcome: Outcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._arrived.set()
        self._on_settled(outcome)


def _post_nothing(message: ToWorker) -> None:
    del message
