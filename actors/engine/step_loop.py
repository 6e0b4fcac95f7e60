"""The engine: computes one step at a time for all live requests.

One thread owns an engine and its router. Time comes in as values; the clock that is passed in only
measures durations and bounds waits. Knows nothing of gateways, sockets or threads:
`actors/attention_worker.py` joins those.

Every submitted (request, attempt) ends in exactly one `Ended`, and the step (or call) that ends a
request frees its blocks and slot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import closing

import torch
from torch import Tensor

from actors.engine.admission import EngineLimits
from actors.engine.batch_building import build_batch
from actors.engine.choosing import Grammars
from actors.engine.lanes import Clock, LaneResult, LaneRouter, StepModel, run_lanes
from actors.engine.outcome import EngineStats, StepOutcome
from actors.engine.request import EngineRequest, RequestKey
from actors.engine.request_table import RequestTable
from actors.engine.sampling import Sampled, prompt_logprobs, sample_requests
from actors.engine.scheduler import TILE_TOKENS, Chunk, LogitsWanted, schedule
from actors.request_channel import LogitRows, NewTokens, PromptLogprobs, Submit
from configs.errors import ServingError
from configs.numerics import EndReason, FinishReason
from model.cache import ModelMemory
from model.constraint_vocabulary import Matcher

MAX_LOGIT_BYTES = 32 << 20
"""Float32 logits of scores in one step: half of what one message may hold."""


class Engine:
    """Continuous batching over one model replica."""

    def __init__(
        self,
        *,
        model: StepModel,
        memory: ModelMemory,
        router: LaneRouter,
        limits: EngineLimits,
        clock: Clock,
        wait_timeout_s: float,
        grammars: Grammars | None = None,
    ) -> None:
        """Take over `memory` and `router`.

        Args:
            model: Runs a lane.
            memory: Pools as large as `limits` says; written by the model only.
            router: Makes the dispatchers of lanes.
            limits: What fits.
            clock: Monotonic seconds.
            wait_timeout_s: A lane that waits longer for experts fails.
            grammars: Applies grammars of requests; None refuses requests with one.
        """
        self.limits = limits
        self._model = model
        self._memory = memory
        self._router = router
        self._clock = clock
        self._wait_timeout_s = wait_timeout_s
        self._grammars = grammars
        self._table = RequestTable(memory, limits, grammars)
        row_bytes = limits.vocab_size * 4
        num_tiles = MAX_LOGIT_BYTES // (row_bytes * TILE_TOKENS)
        self._max_logit_rows = max(1, num_tiles) * TILE_TOKENS
        self._tokens: list[NewTokens] = []
        self._logits: list[LogitRows] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._totals = _Totals()
        self._starved_steps = 0

    def make_matchers(self, submit: Submit) -> list[Matcher | None]:
        """Return what follows each answer to `submit`, for its `submit`. For any thread.

        Raises:
            ServingError: The submission cannot be run here; `submit` would refuse it.
        """
        return self._table.make_matchers(submit)

    def submit(
        self, submit: Submit, now: float, *, matchers: Sequence[Matcher | None] | None = None
    ) -> None:
        """Queue a request. A refusal is an `Ended(REJECTED)` in the next outcome.

        Args:
            submit: What to run.
            now: Monotonic seconds at which it arrived.
            matchers: Of `make_matchers`; None makes them now.

        Raises:
            InvalidRequestError: The same (request, attempt) is live already; it goes on.
        """
        self._table.submit(submit, now, matchers=matchers)

    def refuse(self, submit: Submit, error: ServingError, now: float) -> None:
        """End a request with REJECTED without looking at it, e.g. while draining."""
        self._table.refuse(submit, error, now)

    def cancel(self, key: RequestKey, now: float) -> None:
        """End a request with CANCELLED and free its memory; nothing happens if it is not live."""
        request = self._table.find(key)
        if request is not None:
            self._table.end(request, EndReason.CANCELLED, now)

    def discard(self, key: RequestKey, now: float) -> None:
        """Like `cancel`, but nobody is left to be told: there is no `Ended` in the outcome."""
        request = self._table.find(key)
        if request is not None:
            self._table.end(request, EndReason.CANCELLED, now, is_reported=False)

    def credit(self, key: RequestKey, num_tokens: int) -> None:
        """Let a request generate `num_tokens` more, or a score compute so many more rows.

        Nothing happens if it is not live.
        """
        request = self._table.find(key)
        if request is not None:
            request.credit += max(num_tokens, 0)

    def fail_running(self, error: ServingError, now: float) -> None:
        """End every running request with FAILED and give up what is in flight.

        For a step that raised: the memory of its requests is in an unknown state.
        """
        self._router.abandon_step()
        # Followers first: nobody may take over the memory of a leader that fails.
        for request in reversed(list(self._table.running.values())):
            self._table.end(request, EndReason.FAILED, now, error=error)

    def fail_all(self, error: ServingError, now: float) -> None:
        """End every request, queued ones too, with FAILED."""
        self.fail_running(error, now)
        for request in list(self._table.queued.values()):
            self._table.end(request, EndReason.FAILED, now, error=error)

    def next_deadline(self) -> float | None:
        """Earliest deadline of a live request."""
        deadlines = (request.deadline for request in self._table.live())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def is_live(self, key: RequestKey) -> bool:
        """Whether the request is queued or running."""
        return self._table.find(key) is not None

    @property
    def num_live(self) -> int:
        """Requests queued and running."""
        return len(self._table.queued) + len(self._table.running)

    def stats(self) -> EngineStats:
        """Counters and levels now."""
        table, totals = self._table, self._totals
        return EngineStats(
            num_running=len(table.running),
            num_queued=len(table.queued),
            num_free_blocks=table.blocks.num_free,
            num_used_blocks=table.blocks.num_used,
            num_free_slots=table.slots.num_free,
            num_used_slots=table.slots.num_used,
            steps_total=totals.steps,
            prompt_tokens_total=totals.prompt_tokens,
            generated_tokens_total=totals.generated_tokens,
            replayed_tokens_total=totals.replayed_tokens,
            ended_requests_total=table.num_ended,
            failed_lanes_total=totals.failed_lanes,
            step_seconds_total=totals.step_seconds,
        )

    def step(self, now: float, *, held: Collection[RequestKey] = ()) -> StepOutcome:
        """Expire, admit, compute one step, and return all news since the last one.

        Args:
            now: Monotonic seconds, for deadlines and admission.
            held: Requests to compute nothing for, because their gateway does not read.

        Raises:
            InvariantError: Something impossible; call `fail_running`. Other exceptions of the
                model too; news made before are in the next outcome.
        """
        started_at = self._clock()
        self._table.expire(now)
        plan = schedule(
            self._table.scheduler_state(
                held, max_logit_rows=self._max_logit_rows, starved_steps=self._starved_steps
            )
        )
        self._starved_steps = self._starved_steps + 1 if plan.is_prefill_starved else 0
        self._table.admit(plan, now)
        lanes = [chunks for chunks in (plan.decode, plan.prefill) if chunks]
        if lanes:
            self._totals.steps += 1
            self._run(lanes)
            self._totals.step_seconds += self._clock() - started_at
        tokens, self._tokens = tuple(self._tokens), []
        logits, self._logits = tuple(self._logits), []
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return StepOutcome(
            step=self._totals.steps,
            tokens=tokens,
            logits=logits,
            prompt_logprobs=prompt_logprobs,
            ended=self._table.take_ended(),
            num_computed_tokens=sum(chunk.num_tokens for chunks in lanes for chunk in chunks),
        )

    @torch.inference_mode()
    def _run(self, lanes: Sequence[Sequence[Chunk]]) -> None:
        device = self._memory.kv_MNPC.device
        generators = [
            self._model.run(
                build_batch(chunks, self._table.running, device=device),
                self._memory,
                self._router.lane(step=self._totals.steps, lane=lane),
            )
            for lane, chunks in enumerate(lanes)
        ]
        has_failed = False
        results = run_lanes(
            generators, self._router, clock=self._clock, wait_timeout_s=self._wait_timeout_s
        )
        with closing(results):
            for result in results:
                error = self._take_result(lanes[result.lane], result)
                if error is not None:
                    has_failed = True
                    self._fail_lane(lanes[result.lane], error)
        if has_failed:
            # Only after every lane has ended, so that a failure does not take healthy lanes along.
            self._router.abandon_step()

    def _take_result(self, chunks: Sequence[Chunk], result: LaneResult) -> ServingError | None:
        if result.logits_RV is None:
            return result.error
        try:
            self._take_logits(chunks, result.logits_RV)
        except ServingError as exc:
            return exc
        return None

    def _take_logits(self, chunks: Sequence[Chunk], logits_RV: Tensor) -> None:
        """Record what a lane computed: progress, logits of scores, sampled tokens, ends."""
        sampled: list[EngineRequest] = []
        sampled_rows: list[int] = []
        row = 0
        for chunk in chunks:
            request = self._table.running[chunk.key]
            self._note_progress(request, chunk)
            if chunk.logits is LogitsWanted.ALL:
                self._take_prompt_rows(request, chunk, logits_RV[row : row + chunk.num_tokens])
            row += chunk.num_logit_rows
            if chunk.logits is not LogitsWanted.NONE and request.needs_token:
                members = [request, *self._table.fork_prompt(request)]
                sampled.extend(members)
                sampled_rows.extend([row - 1] * len(members))
        if not sampled:
            return
        if sampled_rows != list(range(logits_RV.shape[0])):
            logits_RV = logits_RV[torch.tensor(sampled_rows, device=logits_RV.device)]
        found = sample_requests(logits_RV, sampled, self._grammars)
        for request, token in zip(sampled, found, strict=True):
            if isinstance(token, ServingError):
                self._table.end(request, EndReason.FAILED, self._clock(), error=token)
            else:
                self._append_token(request, token)

    def _take_prompt_rows(self, request: EngineRequest, chunk: Chunk, logits_TV: Tensor) -> None:
        """Record the logits of prompt positions, or what was asked for of them."""
        submit = request.submit
        if submit.want_logits:
            self._logits.append(_logit_rows(chunk, logits_TV))
            if request.computed == request.num_prompt:
                now = self._clock()
                self._table.end(request, EndReason.FINISHED, now, finish=FinishReason.LENGTH)
        elif submit.prompt_logprobs is not None:
            # Each row says how likely the token after it is.
            next_ids = submit.token_ids[chunk.position + 1 : request.computed + 1]
            if next_ids:
                self._prompt_logprobs.append(
                    PromptLogprobs(
                        submit.request_id,
                        submit.attempt,
                        first_position=chunk.position + 1,
                        logprobs=prompt_logprobs(logits_TV, next_ids, submit.prompt_logprobs),
                    )
                )

    def _note_progress(self, request: EngineRequest, chunk: Chunk) -> None:
        request.take_progress(chunk.num_tokens, self._totals.steps)
        if not chunk.is_decode:
            self._totals.prompt_tokens += chunk.num_tokens
        elif chunk.logits is LogitsWanted.NONE:
            self._totals.replayed_tokens += chunk.num_tokens

    def _append_token(self, request: EngineRequest, sampled: Sampled) -> None:
        now = self._clock()
        try:
            request.append_token(sampled.token_id, now)
        except ServingError as exc:
            self._table.end(request, EndReason.FAILED, now, error=exc)
            return
        self._totals.generated_tokens += 1
        logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
        self._tokens.append(NewTokens(*request.key, [sampled.token_id], logprobs))
        finish = request.find_finish()
        if finish is not None:
            self._table.end(request, EndReason.FINISHED, now, finish=finish)

    def _fail_lane(self, chunks: Sequence[Chunk], error: ServingError) -> None:
        self._totals.failed_lanes += 1
        now = self._clock()
        for chunk in chunks:
            request = self._table.running.get(chunk.key)
            if request is not None:
                # What they wait for is in an unknown state.
                for member in (*request.followers, request):
                    self._table.end(member, EndReason.FAILED, now, error=error)
        # Those that were forked before the lane failed: no row is left to sample them from.
        for request in [one for one in self._table.running.values() if one.needs_token]:
            self._table.end(request, EndReason.FAILED, now, error=error)


class _Totals:
    """Counters that only grow."""

    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.replayed_tokens = 0
        self.failed_lanes = 0
        self.step_seconds = 0.0


def _logit_rows(chunk: Chunk, logits_RV: Tensor) -> LogitRows:
    rows = logits_RV.detach().to("cpu", torch.float32).contiguous().numpy()
    return LogitRows(
        request_id=chunk.key.request_id,
        attempt=chunk.key.attempt,
        first_position=chunk.position,
        num_rows=chunk.num_tokens,
        data=rows.astype("<f4", copy=False).tobytes(),
    )
