"""All live requests of an engine and their order.

A request is queued (owns nothing), then running (owns a slot and blocks), perhaps queued again
because it was preempted, then it has ended (owns nothing, its one `Ended` is made). Memory itself
is `actors/engine/request_memory.py`'s.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterator, Sequence

from actors.engine.admission import EngineLimits, find_overload, find_refusal
from actors.engine.choosing import Grammars, TokenChoice, make_matcher
from actors.engine.deadline_heap import DeadlineHeap
from actors.engine.prompt_sharing import (
    can_share,
    fork_prompt,
    form_group,
    hand_over,
    split_choices,
)
from actors.engine.request import EngineRequest, RequestKey
from actors.engine.request_memory import RequestMemory
from actors.engine.request_queue import RequestQueue
from actors.engine.request_snapshot import RequestSnapshot
from actors.engine.running_rows import RunningRows
from actors.engine.scheduler import StepPlan, plan_admission
from actors.engine.scheduler_state import QueuedView, SchedulerState, SnapshotRule
from actors.request_channel import Ended, Sampling, Submit
from configs.errors import InvalidRequestError, InvariantError, ServingError, SnapshotError
from configs.ids import RequestId
from configs.numerics import EndReason, FinishReason
from model.cache import ModelMemory
from model.constraint_vocabulary import Matcher

logger = logging.getLogger(__name__)
MAX_ADMISSIONS = 16
"""Requests that one step looks at for admission: each lookup of a prefix reads its prompt."""


class RequestTable:
    """Requests by key. Owned by the engine thread."""

    def __init__(
        self,
        model_memory: ModelMemory,
        memory: RequestMemory,
        limits: EngineLimits,
        grammars: Grammars | None = None,
    ) -> None:
        """Begin empty; `memory` is over `model_memory`, both as large as `limits` says."""
        self.limits = limits
        self.memory = memory
        self._model_memory = model_memory
        self._grammars = grammars
        self.running: dict[RequestKey, EngineRequest] = {}
        """In order of admission."""
        self.queued = RequestQueue()
        self.num_ended = 0
        self._rows = RunningRows(limits.num_state_slots)
        self._deadlines = DeadlineHeap()
        self._numbers = itertools.count()
        self._ended: list[Ended] = []

    def make_matchers(self, submit: Submit) -> list[Matcher | None]:
        """Return what follows each answer to `submit`. May be called from any thread.

        Raises:
            ServingError: The submission cannot be run here; `submit` would refuse it.
        """
        refusal = find_refusal(submit, self.limits)
        if refusal is not None:
            raise refusal
        return [make_matcher(submit, self._grammars) for _ in range(submit.num_choices)]

    def submit(
        self,
        submit: Submit,
        now: float,
        *,
        matchers: Sequence[Matcher | None] | None = None,
        snapshot: RequestSnapshot | None = None,
    ) -> None:
        """Queue the requests of a submission, or end them at once if it is refused or complete.

        Args:
            submit: What to run.
            now: Monotonic seconds at which it arrived.
            matchers: Made from it by `make_matchers`; None makes them now.
            snapshot: What an earlier attempt had in memory. One that does not fit the request is
                counted and left; everything is computed.

        Raises:
            InvalidRequestError: One of its (request, attempt) is live. That one goes on; no `Ended`
                is made, because it has one end only.
        """
        choices = split_choices(submit)
        self._check_new(choices)
        try:
            if matchers is None:
                matchers = self.make_matchers(submit)
            requests = [
                self._make_request(one, matcher, now)
                for one, matcher in zip(choices, matchers, strict=True)
            ]
        except ServingError as exc:
            self.refuse(submit, exc, now)
            return
        if len(requests) > 1 and can_share(submit, self.limits):
            form_group(requests)
        for request in requests:
            self.queued.add(request)
            self._deadlines.add(request)
        if snapshot is not None:
            self._attach(requests[0], snapshot)
        overload = find_overload(self._count_waiting(), self.limits)
        for request in reversed(requests):
            if overload is not None:
                self.end(request, EndReason.REJECTED, now, error=overload)
            elif (finish := request.find_finish()) is not None:
                # An earlier attempt generated the last token, but its end was lost.
                self.end(request, EndReason.FINISHED, now, finish=finish)

    def _check_new(self, choices: Sequence[Submit]) -> None:
        for one in choices:
            key = RequestKey(one.request_id, one.attempt)
            if self.find(key) is not None:
                raise InvalidRequestError(
                    f"request {key.request_id} attempt {key.attempt} is already live here; "
                    "use a new request_id or a higher attempt"
                )

    def refuse(self, submit: Submit, error: ServingError, now: float) -> None:
        """End the requests of a submission with REJECTED without looking at it."""
        for one in split_choices(submit):
            request = EngineRequest(
                submit=one,
                arrived_at=now,
                number=next(self._numbers),
                choice=_NO_CHOICE,
                deadline=None,
                credit=0,
            )
            self.end(request, EndReason.REJECTED, now, error=error)

    def _make_request(self, submit: Submit, matcher: Matcher | None, now: float) -> EngineRequest:
        return EngineRequest(
            submit=submit,
            arrived_at=now,
            number=next(self._numbers),
            choice=TokenChoice(submit, matcher),
            deadline=None if submit.timeout_s is None else now + submit.timeout_s,
            credit=submit.credit_tokens,
            generated=list(submit.generated_ids),
        )

    def _attach(self, request: EngineRequest, snapshot: RequestSnapshot) -> None:
        try:
            self.memory.attach(request, snapshot)
        except SnapshotError as exc:
            self.memory.counters.num_refused_snapshots += 1
            logger.warning("%s; its tokens are computed again", exc.message)

    def find(self, key: RequestKey) -> EngineRequest | None:
        """Return a live request."""
        running = self.running.get(key)
        return self.queued.get(key) if running is None else running

    def live(self) -> Iterator[EngineRequest]:
        """Running requests, then queued ones."""
        return itertools.chain(self.running.values(), self.queued)

    def expire(self, now: float) -> None:
        """End every request whose deadline has passed."""
        for request in self._deadlines.pop_passed(now):
            self.end(request, EndReason.DEADLINE, now)

    def next_deadline(self) -> float | None:
        """Earliest deadline of a live request."""
        return self._deadlines.first()

    def credit(self, request: EngineRequest, num_tokens: int) -> None:
        """Let a request go on by so many tokens or rows."""
        request.credit += max(num_tokens, 0)
        self.update(request)

    def set_leaving(self, request: EngineRequest) -> None:
        """Compute nothing for a request from now on: it is moving to another worker."""
        request.is_leaving = True
        self.update(request)

    def update(self, request: EngineRequest) -> None:
        """Tell the scheduler what has changed of a request. Call after every change."""
        if request.slot is None:
            self.queued.refresh(request)
        else:
            self._rows.update(request)

    def preempt(self, plan: StepPlan) -> None:
        """Take the memory of the preempted requests; they queue again at their rank."""
        for key in plan.preempted:
            request = self.running[key]
            self.memory.preempt(request)
            for one in (request, *request.followers):
                del self.running[one.key]
                self._rows.remove(one.key)
                self.queued.add(one)

    def admit(self, plan: StepPlan, now: float, step: int) -> None:
        """Give the admitted requests, and those that follow them, their memory.

        Making room for one can cost another the prefix that it was going to start at; then it, and
        those behind it, wait for the next step.
        """
        for key in plan.admitted:
            request = self.queued.get(key)
            if request is None:
                continue
            if self.memory.queued_view(request).num_blocks > self.memory.num_available_blocks:
                return
            self.memory.start(request)
            for one in (request, *request.followers):
                self.queued.remove(one)
                self.running[one.key] = one
                one.last_step = step
                if one.admitted_at is None:
                    one.admitted_at = now
                self._rows.add(one)

    def grow(self, request: EngineRequest) -> None:
        """Give a running request the block that its next token needs, if any."""
        self.memory.grow(request)
        self._rows.update(request)

    def fork_prompt(self, request: EngineRequest) -> list[EngineRequest]:
        """Give the followers of a request the prompt that it has computed; returns them."""
        followers = fork_prompt(request, self._model_memory)
        for one in (request, *followers) if followers else ():
            self._rows.update(one)
        return followers

    def end(
        self,
        request: EngineRequest,
        reason: EndReason,
        now: float,
        *,
        finish: FinishReason | None = None,
        error: ServingError | None = None,
        is_reported: bool = True,
    ) -> None:
        """Make the one `Ended` of a request and free what it owns.

        Args:
            request: Live, or refused before it was queued.
            reason: Why it ends.
            now: Monotonic seconds.
            finish: With FINISHED.
            error: With REJECTED and FAILED.
            is_reported: False when its gateway is gone.

        Raises:
            InvariantError: It has ended before.
        """
        key = request.key
        if request.is_ended:
            raise InvariantError(f"request {key} ends a second time, with {reason}")
        self._leave_group(request)
        if self.running.get(key) is request:
            del self.running[key]
            self._rows.remove(key)
        self.queued.remove(request)
        if reason in _REUSABLE_ENDS:
            self.memory.save_end(request)
        self.memory.release(request)
        request.is_ended = True
        self.num_ended += 1
        if not is_reported:
            return
        self._ended.append(
            Ended(
                request_id=key.request_id,
                attempt=key.attempt,
                reason=reason,
                usage=request.usage(now),
                finish_reason=finish,
                error_code="" if error is None else error.code,
                error_message="" if error is None else error.message,
            )
        )

    def _leave_group(self, request: EngineRequest) -> None:
        leader = request.leader
        if leader is not None:
            leader.followers.remove(request)
            request.leader = None
            self.update(leader)
        elif request.followers:
            heir = hand_over(request)
            if heir.slot is None:
                self.queued.refresh(heir)
                return
            # Slots have changed hands.
            for one in (request, heir):
                self._rows.remove(one.key)
                self._rows.add(one)

    def take_ended(self) -> tuple[Ended, ...]:
        """Ends since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def scheduler_state(
        self,
        held: Collection[RequestKey],
        *,
        max_logit_rows: int,
        step: int,
        starved_steps: int,
    ) -> SchedulerState:
        """The frozen state that the next step is planned from."""
        memory, limits = self.memory, self.limits
        queued = self._queue_head(held)
        num_available = memory.num_available_blocks
        # Whoever may be preempted is counted out exactly; that is dear, and rare. A step takes one
        # block at most for each request that runs.
        may_displace = bool(queued) and (
            bool(held) or self._rows.can_displace(queued[0].priority, step)
        )
        is_tight = num_available < len(self.running) or may_displace
        rule = None
        if memory.prefixes.is_enabled:
            rule = SnapshotRule(
                interval_tokens=limits.snapshots.interval_tokens,
                min_gain_tokens=limits.snapshots.min_gain_tokens,
                num_scratch=len(memory.slots.scratch),
            )
        return SchedulerState(
            running=self._rows.view(self.running, held, memory.blocks, is_tight=is_tight),
            queued=queued,
            num_available_blocks=num_available,
            num_free_slots=memory.slots.num_free,
            block_tokens=limits.block_tokens,
            max_step_tokens=limits.max_step_tokens,
            max_logit_rows=max_logit_rows,
            step=step,
            starved_steps=starved_steps,
            may_displace=may_displace,
            snapshots=rule,
        )

    def _queue_head(
        self, held: Collection[RequestKey], max_heads: int = MAX_ADMISSIONS
    ) -> tuple[QueuedView, ...]:
        # Even without a free slot the first is shown: others may have to give way to it.
        num_heads = min(max(self.memory.slots.num_free, 1), max_heads)
        num_left = self.memory.num_available_blocks
        views: list[QueuedView] = []
        for request in self.queued.heads(num_heads, held):
            view = self.memory.queued_view(request)
            views.append(view._replace(num_ahead=self._rows.count_ahead(request.rank)))
            num_left -= view.num_blocks
            if num_left < 0:
                break  # Nobody behind it can be admitted either.
        return tuple(views)

    def _count_waiting(self) -> int:
        """Queued requests that cannot be admitted now, or all where so many may wait."""
        if len(self.queued) <= self.limits.max_queued_requests:
            return len(self.queued)
        startable = plan_admission(
            self._queue_head((), max_heads=self.limits.num_state_slots),
            num_available_blocks=self.memory.num_available_blocks,
            num_free_slots=self.memory.slots.num_free,
            num_running=len(self.running),
        )
        return len(self.queued) - sum(view.num_slots for view in startable)


_REUSABLE_ENDS = (EndReason.FINISHED, EndReason.CANCELLED)
"""Their conversation may go on: a gateway cancels what a stop text has ended."""
_NO_CHOICE = TokenChoice(
    Submit(RequestId(""), 0, token_ids=[], max_tokens=0, sampling=Sampling(), stop_token_ids=[]),
    None,
)
"""Of requests that are refused before anything is chosen."""
