"""What has come of one request so far, over all attempts at it, and the submission that goes on.

Pure bookkeeping: tokens, rows and log-probabilities are counted by their place in the answer, so
that what an attempt computes again is dropped, and credit counts the whole answer, whichever worker
makes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from actors.request_channel import (
    LogitRows,
    PromptLogprobs,
    SnapshotPlace,
    Submit,
    Usage,
    choice_id,
)


def choice_submit(submit: Submit, choice: int) -> Submit:
    """Return the submission of one of the answers that another one asks for, as the worker does."""
    if submit.num_choices <= 1:
        return submit
    return msgspec.structs.replace(
        submit,
        request_id=choice_id(submit.request_id, choice),
        sampling=msgspec.structs.replace(submit.sampling, choice=submit.sampling.choice + choice),
        num_choices=1,
        prompt_logprobs=submit.prompt_logprobs if choice == 0 else None,
    )


class RequestProgress:
    """The part of a request that its reader has got, or can get without any worker.

    Args:
        submit: The first attempt, of this answer alone.
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, submit: Submit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.submit = submit
        """The current attempt."""
        self.num_received = 0
        """Tokens, or rows of a score."""
        self.num_granted = submit.credit_tokens
        """Tokens, or rows of a score, that workers may have sent so far."""
        self.snapshot: SnapshotPlace | None = None
        """The last copy of the request's memory outside its worker."""
        self._clock = clock
        self._token_ids: list[int] = []
        self._next_prompt_position = 1
        self._began_at = self._attempt_began_at = clock()
        self._deadline = None if submit.timeout_s is None else self._began_at + submit.timeout_s
        self._first_token_at: float | None = None
        self._past_queue_s = 0.0
        self._num_before = 0

    @property
    def time_left_s(self) -> float | None:
        """Seconds left of the client's deadline, not below 0; None has none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def take_tokens(self, token_ids: list[int]) -> None:
        """Count tokens; the worker never sends one again."""
        if self._first_token_at is None:
            self._first_token_at = self._clock()
        self._token_ids.extend(token_ids)
        self.num_received += len(token_ids)

    def take_rows(self, rows: LogitRows) -> LogitRows | None:
        """Count rows and return those that are new; None where none is."""
        num_old = max(0, self.num_received - rows.first_position)
        if num_old >= rows.num_rows:
            return None
        self.num_received += rows.num_rows - num_old
        if num_old == 0:
            return rows
        return msgspec.structs.replace(
            rows,
            first_position=rows.first_position + num_old,
            num_rows=rows.num_rows - num_old,
            data=rows.data[len(rows.data) // rows.num_rows * num_old :],
        )

    def take_prompt_logprobs(self, news: PromptLogprobs) -> PromptLogprobs | None:
        """Return those that are new; None where none is."""
        num_old = max(0, self._next_prompt_position - news.first_position)
        if num_old >= len(news.logprobs):
            return None
        self._next_prompt_position = news.first_position + len(news.logprobs)
        if num_old == 0:
            return news
        return msgspec.structs.replace(
            news,
            first_position=news.first_position + num_old,
            logprobs=news.logprobs[num_old:],
        )

    def leave(self, usage: Usage) -> None:
        """Note what the current attempt had cost when its worker gave it up."""
        self._past_queue_s += usage.queue_s

    def begin_attempt(self, *, takes_snapshot: bool) -> Submit:
        """Begin the next attempt and return its submission.

        Args:
            takes_snapshot: Whether the last snapshot can still be there.
        """
        submit = self.submit
        is_score = submit.want_logits
        is_prompt_told = self._next_prompt_position >= len(submit.token_ids)
        self.submit = msgspec.structs.replace(
            submit,
            attempt=submit.attempt + 1,
            timeout_s=self.time_left_s,
            # Rows are computed again from the first one on, and each costs credit.
            credit_tokens=self.num_granted - (0 if is_score else self.num_received),
            generated_ids=list(self._token_ids),
            prompt_logprobs=None if is_prompt_told else submit.prompt_logprobs,
            snapshot=self.snapshot if takes_snapshot and not is_score else None,
        )
        self._attempt_began_at = self._clock()
        self._num_before = len(self._token_ids)
        return self.submit

    def whole_usage(self, usage: Usage) -> Usage:
        """Return what the request has cost, with times from its first arrival at a worker.

        Args:
            usage: Of the current attempt; its token counts are right as they are.
        """
        before_s = self._attempt_began_at - self._began_at
        first_token_s = usage.first_token_s + before_s if usage.first_token_s else 0.0
        if self._num_before and self._first_token_at is not None:
            first_token_s = self._first_token_at - self._began_at
        return msgspec.structs.replace(
            usage,
            queue_s=usage.queue_s + self._past_queue_s,
            first_token_s=first_token_s,
            total_s=usage.total_s + before_s,
        )
