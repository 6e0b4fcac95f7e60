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
from actors.engine.costs import Way, decide_move
from actors.engine.lanes import Clock, LaneResult, LaneRouter, StepModel, run_lanes
from actors.engine.outcome import EngineStats, StepOutcome
from actors.engine.request import EngineRequest, RequestKey
from actors.engine.request_memory import RequestMemory
from actors.engine.request_snapshot import RequestSnapshot
from actors.engine.request_table import RequestTable
from actors.engine.sampling import Sampled, prompt_logprobs, sample_requests
from actors.engine.scheduler import Chunk, LogitsWanted, StepPlan, schedule
from actors.engine.scheduler_state import TILE_TOKENS
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
        fingerprint: str = "",
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
            fingerprint: Names the model and how it computes; copies of requests carry it.
        """
        self.limits = limits
        self._model = model
        self._memory = memory
        self._router = router
        self._clock = clock
        self._wait_timeout_s = wait_timeout_s
        self._grammars = grammars
        self.requests = RequestMemory(memory, limits, model=fingerprint, clock=clock)
        self._table = RequestTable(memory, self.requests, limits, grammars)
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
        self,
        submit: Submit,
        now: float,
        *,
        matchers: Sequence[Matcher | None] | None = None,
        snapshot: RequestSnapshot | None = None,
    ) -> None:
        """Queue a request. A refusal is an `Ended(REJECTED)` in the next outcome.

        Args:
            submit: What to run.
            now: Monotonic seconds at which it arrived.
            matchers: Of `make_matchers`; None makes them now.
            snapshot: What an earlier attempt had in memory; checked, and left if it does not fit.

        Raises:
            InvalidRequestError: The same (request, attempt) is live already; it goes on.
        """
        self._table.submit(submit, now, matchers=matchers, snapshot=snapshot)

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
            self._table.credit(request, num_tokens)

    def live_keys(self) -> tuple[RequestKey, ...]:
        """All queued and running requests, running ones first."""
        return tuple(request.key for request in self._table.live())

    def begin_move(self, key: RequestKey) -> RequestSnapshot | None:
        """Compute nothing more for a request that goes to another worker, and copy its memory.

        Returns:
            The copy; None if there is nothing to copy, or computing it again is cheaper.
        """
        request = self._table.find(key)
        if request is None:
            return None
        self._table.set_leaving(request)
        if request.snapshot is not None and not request.wants_rows:
            return request.snapshot
        if request.computed == 0 or request.leader is not None or request.wants_rows:
            # Rows of a prompt are reported anew by whoever computes it.
            return None
        way = decide_move(self.requests.progress(request, is_moving=True), self.requests.costs)
        return self.requests.capture(request) if way is Way.RESTORE else None

    def end_move(self, key: RequestKey, now: float) -> None:
        """End a request with MOVED and free its memory; nothing happens if it is not live."""
        request = self._table.find(key)
        if request is not None:
            self.requests.counters.num_moved += 1
            self._table.end(request, EndReason.MOVED, now)

    def copy_next(self, interval_tokens: int) -> tuple[RequestKey, RequestSnapshot] | None:
        """Copy the running request with the most tokens since its last copy; it goes on.

        Returns:
            None if none has `interval_tokens` new ones.
        """
        running = (one for one in self._table.running.values() if one.leader is None)
        request = max(running, key=lambda one: one.computed - one.num_copied, default=None)
        if request is None or request.computed - request.num_copied < interval_tokens:
            return None
        request.num_copied = request.computed
        return request.key, self.requests.capture(request)

    def flush_prefixes(self) -> int:
        """Forget all prefix snapshots; returns how many."""
        return self.requests.prefixes.flush()

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
        for request in self._table.queued:
            self._table.end(request, EndReason.FAILED, now, error=error)

    def next_deadline(self) -> float | None:
        """Earliest deadline of a live request."""
        return self._table.next_deadline()

    def is_live(self, key: RequestKey) -> bool:
        """Whether the request is queued or running."""
        return self._table.find(key) is not None

    @property
    def num_live(self) -> int:
        """Requests queued and running."""
        return len(self._table.queued) + len(self._table.running)

    def stats(self) -> EngineStats:
        """Counters and levels now."""
        table, totals, memory = self._table, self._totals, self.requests
        counters = memory.counters
        return EngineStats(
            num_running=len(table.running),
            num_queued=len(table.queued),
            num_free_blocks=memory.blocks.num_free,
            num_used_blocks=memory.blocks.num_used,
            num_cached_blocks=memory.blocks.num_cached,
            num_free_slots=memory.slots.num_free,
            num_used_slots=memory.slots.num_used,
            num_prefix_snapshots=len(memory.prefixes),
            prefix_snapshot_bytes=memory.prefixes.num_bytes,
            request_copy_bytes=memory.prefixes.reserved_bytes,
            prefix_hits_total=counters.num_hits,
            prefix_hit_tokens_total=counters.num_hit_tokens,
            prefix_evictions_total=memory.prefixes.num_evicted,
            kept_preemptions_total=counters.num_kept_preemptions,
            dropped_preemptions_total=counters.num_dropped_preemptions,
            recomputed_tokens_total=counters.num_recomputed_tokens,
            restores_total=counters.num_restores,
            refused_snapshots_total=counters.num_refused_snapshots,
            moved_requests_total=counters.num_moved,
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
                held,
                max_logit_rows=self._max_logit_rows,
                step=self._totals.steps,
                starved_steps=self._starved_steps,
            )
        )
        self._starved_steps = self._starved_steps + 1 if plan.is_prefill_starved else 0
        lanes = self._apply(plan, now)
        if lanes:
            self._totals.steps += 1
            self._run(lanes)
            self._measure(lanes, self._clock() - started_at)
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
            num_preempted=len(plan.preempted),
        )

    def _apply(self, plan: StepPlan, now: float) -> list[Sequence[Chunk]]:
        """Give and take memory as planned; returns the lanes to compute."""
        table = self._table
        table.preempt(plan)
        decode = tuple(plan.decode)
        for chunk in decode:
            table.grow(table.running[chunk.key])
        table.admit(plan, now, self._totals.steps)
        # One that could not be admitted, or that starts elsewhere now, is planned again.
        prefill = [
            chunk
            for chunk in plan.prefill
            if (request := table.running.get(chunk.key)) is not None
            and request.computed == chunk.position
        ]
        return [chunks for chunks in (decode, prefill) if chunks]

    def _measure(self, lanes: Sequence[Sequence[Chunk]], seconds: float) -> None:
        """Learn from a step what prefill and replay cost."""
        self._totals.step_seconds += seconds
        num_prefilled = sum(c.num_tokens for chunks in lanes for c in chunks if not c.is_decode)
        costs = self.requests.costs
        if num_prefilled:
            costs = costs.measured(prefill_s_per_token=seconds / num_prefilled)
        else:
            num_waves = max(chunk.num_tokens for chunks in lanes for chunk in chunks)
            costs = costs.measured(replay_s_per_token=seconds / num_waves)
        self.requests.costs = costs

    @torch.inference_mode()
    def _run(self, lanes: Sequence[Sequence[Chunk]]) -> None:
        device = self._memory.kv_MNPC.device
        generators = [
            self._model.run(
                build_batch(
                    chunks,
                    self._table.running,
                    scratch=self.requests.slots.scratch,
                    device=device,
                ),
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
        self._save_prefixes(chunks)
        sampled: list[EngineRequest] = []
        sampled_rows: list[int] = []
        row = 0
        for chunk in chunks:
            request = self._table.running[chunk.key]
            num_old = self._note_progress(request, chunk)
            if chunk.logits is LogitsWanted.ALL:
                rows = slice(row + num_old, row + chunk.num_tokens)
                self._take_prompt_rows(request, chunk.position + num_old, logits_RV[rows])
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

    def _save_prefixes(self, chunks: Sequence[Chunk]) -> None:
        """Leave the prefix snapshots that were planned, before any of the requests ends."""
        scratch = iter(self.requests.slots.scratch)
        for chunk in chunks:
            request = self._table.running[chunk.key]
            if chunk.save_at is None or request.slot is None:
                continue
            slot = request.slot if chunk.save_at == chunk.end else next(scratch)
            self.requests.save_prefix(request, chunk.save_at, slot)

    def _take_prompt_rows(self, request: EngineRequest, position: int, logits_TV: Tensor) -> None:
        """Record the logits from a prompt position on, or what was asked for of them."""
        submit = request.submit
        if submit.want_logits:
            if logits_TV.shape[0]:
                self._logits.append(_logit_rows(request.key, position, logits_TV))
            if request.computed == request.num_prompt:
                now = self._clock()
                self._table.end(request, EndReason.FINISHED, now, finish=FinishReason.LENGTH)
        elif submit.prompt_logprobs is not None:
            # Each row says how likely the token after it is.
            next_ids = submit.token_ids[position + 1 : request.computed + 1]
            if next_ids:
                self._prompt_logprobs.append(
                    PromptLogprobs(
                        submit.request_id,
                        submit.attempt,
                        first_position=position + 1,
                        logprobs=prompt_logprobs(logits_TV, next_ids, submit.prompt_logprobs),
                    )
                )

    def _note_progress(self, request: EngineRequest, chunk: Chunk) -> int:
        """Count what a chunk computed; returns how many of its first rows were known before."""
        num_old = request.take_progress(chunk.num_tokens, self._totals.steps)
        self._table.update(request)
        if not chunk.is_decode:
            self._totals.prompt_tokens += chunk.num_tokens
        elif chunk.logits is LogitsWanted.NONE:
            self._totals.replayed_tokens += chunk.num_tokens
        return num_old

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
        else:
            self._table.update(request)

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


def _logit_rows(key: RequestKey, position: int, logits_RV: Tensor) -> LogitRows:
    rows = logits_RV.detach().to("cpu", torch.float32).contiguous().numpy()
    return LogitRows(
        request_id=key.request_id,
        attempt=key.attempt,
        first_position=position,
        num_rows=rows.shape[0],
        data=rows.astype("<f4", copy=False).tobytes(),
    )
