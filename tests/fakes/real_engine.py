"""An engine over a small real model, its experts computed in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

from actors.engine.admission import EngineLimits, SnapshotLimits
from actors.engine.costs import Costs
from actors.engine.request import RequestKey
from actors.engine.request_memory import num_scratch
from actors.engine.scheduler import DecodeLane, StepPlan
from actors.engine.step_loop import Engine
from actors.request_channel import Ended, NewTokens, Submit
from configs.numerics import Numerics
from model.cache import allocate_memory
from model.dispatcher import Dispatcher, Ticket
from tests.fakes.small_model import CPU, GroupedDispatcher, SmallModel


class InPlaceRouter:
    """A `LaneRouter` whose answers are there at once."""

    def __init__(self, model: SmallModel) -> None:
        self._dispatcher = GroupedDispatcher(model.experts)

    def lane(self, *, step: int, lane: int) -> Dispatcher:
        return self._dispatcher

    def wait_any(self, tickets: Sequence[Ticket], *, deadline: float) -> None:
        raise AssertionError("no ticket of this router waits")

    def abandon_step(self) -> None:
        pass


@cache
def small_model(numerics: Numerics = Numerics.INVARIANT) -> SmallModel:
    return SmallModel.build(numerics=numerics)


class RealEngine:
    """An engine and everything it said, by request."""

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        block_tokens: int = 16,
        num_slots: int = 4,
        max_step_tokens: int = 64,
        snapshots: SnapshotLimits | None = None,
        costs: Costs | None = None,
        numerics: Numerics = Numerics.INVARIANT,
    ) -> None:
        model = small_model(numerics)
        rule = SnapshotLimits() if snapshots is None else snapshots
        dtype = model.memory.kv_MNPC.dtype
        self.limits = EngineLimits(
            vocab_size=model.dims.vocab_size,
            context_tokens=model.dims.context_tokens,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            num_state_slots=num_slots,
            max_step_tokens=max_step_tokens,
            max_queued_requests=100,
            snapshots=rule,
        )
        memory = allocate_memory(
            model.dims,
            num_blocks=num_blocks,
            block_size=block_tokens,
            num_slots=num_slots + num_scratch(rule.max_bytes),
            dtype=dtype,
            device=CPU,
        )
        # What nobody has written must not matter.
        for pool in (memory.kv_MNPC, memory.state_ASHDD, memory.conv_ASJ3HD):
            pool.fill_(float("nan"))
        self.engine = Engine(
            model=model.decoder,
            memory=memory,
            router=InPlaceRouter(model),
            limits=self.limits,
            clock=time.monotonic,
            wait_timeout_s=10.0,
            fingerprint="small",
        )
        if costs is not None:
            self.engine.requests.costs = costs
        self.news: dict[RequestKey, list[NewTokens]] = {}
        self.ended: dict[RequestKey, Ended] = {}

    def submit(self, message: Submit, **extra) -> None:
        self.engine.submit(message, 0.0, **extra)

    def step(self) -> None:
        outcome = self.engine.step(0.0)
        self.engine.requests.check()
        for news in outcome.tokens:
            self.news.setdefault(RequestKey(news.request_id, news.attempt), []).append(news)
        for end in outcome.ended:
            self.ended[RequestKey(end.request_id, end.attempt)] = end

    def run(self) -> None:
        for _ in range(3000):
            if not self.engine.num_live:
                break
            self.step()
        self.step()
        assert not self.engine.num_live

    def preempt(self, key: RequestKey) -> None:
        """As the scheduler would."""
        if key in self.engine._table.running:
            self.engine._table.preempt(
                StepPlan((key,), (), DecodeLane(), (), is_prefill_starved=False)
            )

    def tokens(self, key: RequestKey) -> list[int]:
        return [token for news in self.news.get(key, ()) for token in news.token_ids]

    def logprobs(self, key: RequestKey) -> list[object]:
        """Log-probabilities of the most likely tokens at each position: bits of the logits."""
        return [one for news in self.news.get(key, ()) for one in news.logprobs]

    @property
    def stats(self):
        return self.engine.stats()

    def assert_memory_is_free(self) -> None:
        stats = self.stats
        assert (stats.num_used_blocks, stats.num_used_slots) == (0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == self.limits.num_blocks
        assert stats.request_copy_bytes == 0
