"""All live requests of an engine, their order, and the memory they own.

A request is queued (owns nothing), then running (owns a slot and all blocks it can need), then it
has ended (owns nothing, its one `Ended` is made). Nobody else allocates or frees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, islice

from actors.engine.admission import EngineLimits, blocks_needed, find_overload, find_refusal
from actors.engine.block_pool import BlockPool
from actors.engine.choosing import Grammars, TokenChoice, make_matcher
from actors.engine.prompt_sharing import (
    allocate_follower_blocks,
    can_share,
    fork_prompt,
    form_group,
    group_need,
    hand_over,
    split_choices,
)
from actors.engine.request import EngineRequest, RequestKey
from actors.engine.scheduler import RequestView, SchedulerState, StepPlan, plan_admission
from actors.engine.state_pool import StatePool
from actors.request_channel import Ended, Sampling, Submit
from configs.errors import InvalidRequestError, InvariantError, ServingError
from configs.ids import RequestId
from configs.numerics import EndReason, FinishReason
from model.cache import ModelMemory
from model.constraint_vocabulary import Matcher


class RequestTable:
    """Requests by key. Owned by the engine thread."""

    def __init__(
        self, memory: ModelMemory, limits: EngineLimits, grammars: Grammars | None = None
    ) -> None:
        if (memory.num_blocks, memory.block_size, memory.num_slots) != (
            limits.num_blocks,
            limits.block_tokens,
            limits.num_state_slots,
        ):
            raise InvariantError(
                f"memory has {memory.num_blocks} blocks of {memory.block_size} and "
                f"{memory.num_slots} slots; the limits state {limits}"
            )
        self.limits = limits
        self._memory = memory
        self._grammars = grammars
        self.blocks = BlockPool(memory.num_blocks)
        self.slots = StatePool(memory)
        self.running: dict[RequestKey, EngineRequest] = {}
        """In order of admission."""
        self.queued: dict[RequestKey, EngineRequest] = {}
        """In order of arrival."""
        self.num_ended = 0
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
        self, submit: Submit, now: float, *, matchers: Sequence[Matcher | None] | None = None
    ) -> None:
        """Queue the requests of a submission, or end them at once if it is refused or complete.

        Args:
            submit: What to run.
            now: Monotonic seconds at which it arrived.
            matchers: Made from it by `make_matchers`; None makes them now.

        Raises:
            InvalidRequestError: One of its (request, attempt) is live. That one goes on; no `Ended`
                is made, because it has one end only.
        """
        choices = split_choices(submit)
        for one in choices:
            key = RequestKey(one.request_id, one.attempt)
            if self.find(key) is not None:
                raise InvalidRequestError(
                    f"request {key.request_id} attempt {key.attempt} is already live here; "
                    "use a new request_id or a higher attempt"
                )
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
        self.queued.update((request.key, request) for request in requests)
        overload = find_overload(self._count_waiting(), self.limits)
        for request in reversed(requests):
            if overload is not None:
                self.end(request, EndReason.REJECTED, now, error=overload)
            elif (finish := request.find_finish()) is not None:
                # An earlier attempt generated the last token, but its end was lost.
                self.end(request, EndReason.FINISHED, now, finish=finish)

    def refuse(self, submit: Submit, error: ServingError, now: float) -> None:
        """End the requests of a submission with REJECTED without looking at it."""
        for one in split_choices(submit):
            request = EngineRequest(
                submit=one,
                arrived_at=now,
                num_blocks=0,
                choice=_NO_CHOICE,
                deadline=None,
                credit=0,
            )
            self.end(request, EndReason.REJECTED, now, error=error)

    def _make_request(self, submit: Submit, matcher: Matcher | None, now: float) -> EngineRequest:
        return EngineRequest(
            submit=submit,
            arrived_at=now,
            num_blocks=blocks_needed(
                len(submit.token_ids) + max(submit.max_tokens, 0), self.limits.block_tokens
            ),
            choice=TokenChoice(submit, matcher),
            deadline=None if submit.timeout_s is None else now + submit.timeout_s,
            credit=submit.credit_tokens,
            generated=list(submit.generated_ids),
        )

    def find(self, key: RequestKey) -> EngineRequest | None:
        """Return a live request."""
        running = self.running.get(key)
        return self.queued.get(key) if running is None else running

    def live(self) -> Iterator[EngineRequest]:
        """Running requests, then queued ones."""
        return chain(self.running.values(), self.queued.values())

    def expire(self, now: float) -> None:
        """End every request whose deadline has passed."""
        for request in list(self.live()):
            if request.deadline is not None and request.deadline <= now:
                self.end(request, EndReason.DEADLINE, now)

    def admit(self, plan: StepPlan, now: float) -> None:
        """Give the admitted requests, and those that follow them, their memory."""
        for key in plan.admitted:
            request = self.queued[key]
            self._start(request, self.blocks.allocate(request.num_blocks), now)
            for follower in request.followers:
                blocks = allocate_follower_blocks(
                    follower, request, self.blocks, self.limits.block_tokens
                )
                self._start(follower, blocks, now)

    def fork_prompt(self, request: EngineRequest) -> list[EngineRequest]:
        """Give the followers of a request the prompt that it has computed; returns them."""
        return fork_prompt(request, self._memory)

    def _start(self, request: EngineRequest, blocks: tuple[int, ...], now: float) -> None:
        del self.queued[request.key]
        self.running[request.key] = request
        request.slot = self.slots.allocate()
        request.blocks = blocks
        request.admitted_at = now

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
        if self.find(key) is request:
            self.running.pop(key, None)
            self.queued.pop(key, None)
        if request.slot is not None:
            self.slots.free(request.slot)
            self.blocks.free(request.blocks)
            request.slot, request.blocks = None, ()
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
        if request.leader is not None:
            request.leader.followers.remove(request)
            request.leader = None
        elif request.followers:
            hand_over(request)

    def take_ended(self) -> tuple[Ended, ...]:
        """Ends since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def scheduler_state(
        self,
        held: Collection[RequestKey],
        *,
        max_logit_rows: int,
        starved_steps: int,
    ) -> SchedulerState:
        """The frozen state that the next step is planned from."""
        return SchedulerState(
            running=tuple(self._view(request, held) for request in self.running.values()),
            queued=self._queue_head(held),
            num_free_blocks=self.blocks.num_free,
            num_free_slots=self.slots.num_free,
            max_step_tokens=self.limits.max_step_tokens,
            max_logit_rows=max_logit_rows,
            starved_steps=starved_steps,
        )

    def _queue_head(self, held: Collection[RequestKey]) -> tuple[RequestView, ...]:
        # Followers come with their leader.
        heads = (request for request in self.queued.values() if request.leader is None)
        return tuple(self._view(request, held) for request in islice(heads, self.slots.num_free))

    def _count_waiting(self) -> int:
        """Queued requests that the next step cannot admit."""
        startable = plan_admission(
            self._queue_head(()),
            num_free_blocks=self.blocks.num_free,
            num_free_slots=self.slots.num_free,
        )
        return len(self.queued) - sum(view.num_slots for view in startable)

    def _view(self, request: EngineRequest, held: Collection[RequestKey]) -> RequestView:
        key, submit = request.key, request.submit
        need = group_need(
            request.num_prompt,
            request.num_blocks,
            1 + len(request.followers),
            self.limits.block_tokens,
        )
        return RequestView(
            key=key,
            num_prompt=request.num_prompt,
            num_known=request.num_known,
            computed=request.computed,
            num_blocks=need.num_blocks,
            num_slots=need.num_slots,
            is_paused=request.is_paused or key in held,
            row_credit=request.credit if submit.want_logits else None,
            wants_prompt_logprobs=submit.prompt_logprobs is not None,
            last_step=request.last_step,
        )


_NO_CHOICE = TokenChoice(
    Submit(RequestId(""), 0, token_ids=[], max_tokens=0, sampling=Sampling(), stop_token_ids=[]),
    None,
)
"""Of requests that are refused before anything is chosen."""
