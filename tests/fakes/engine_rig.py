"""An engine over the fake decoder, and short ways to talk to it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.engine.admission import EngineLimits
from actors.engine.choosing import Grammars
from actors.engine.costs import Costs
from actors.engine.outcome import StepOutcome
from actors.engine.request import RequestKey
from actors.engine.step_loop import Engine
from actors.request_channel import Ended, LogitRows, Sampling, Submit
from configs.ids import RequestId
from tests.fakes.fake_decoder import FakeDecoder, FakeRouter, fake_memory

VOCAB = 61


def limits(**changes: Any) -> EngineLimits:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_tokens": 256,
        "num_blocks": 32,
        "block_tokens": 16,
        "num_state_slots": 4,
        "max_step_tokens": 64,
        "max_queued_requests": 64,
    }
    return EngineLimits(**{**values, **changes})


def submit(
    name: str = "r",
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 4,
    *,
    attempt: int = 0,
    stop: Sequence[int] = (),
    timeout_s: float | None = None,
    credit: int = 4096,
    generated: Sequence[int] = (),
    sampling: Sampling | None = None,
    choices: int = 1,
    grammar: str = "",
) -> Submit:
    return Submit(
        request_id=RequestId(name),
        attempt=attempt,
        token_ids=list(prompt),
        max_tokens=max_tokens,
        sampling=Sampling() if sampling is None else sampling,
        stop_token_ids=list(stop),
        timeout_s=timeout_s,
        credit_tokens=credit,
        generated_ids=list(generated),
        num_choices=choices,
        grammar=grammar,
    )


def score(
    name: str, prompt: Sequence[int], *, timeout_s: float | None = None, credit: int = 4096
) -> Submit:
    return Submit(
        request_id=RequestId(name),
        attempt=0,
        token_ids=list(prompt),
        max_tokens=0,
        sampling=Sampling(),
        stop_token_ids=[],
        timeout_s=timeout_s,
        credit_tokens=credit,
        want_logits=True,
    )


def key(name: str = "r", attempt: int = 0) -> RequestKey:
    return RequestKey(RequestId(name), attempt)


@dataclass
class EngineRig:
    """An engine, its fakes, its time, and everything that it said."""

    limits: EngineLimits = field(default_factory=limits)
    router: FakeRouter = field(default_factory=FakeRouter)
    now: float = 0.0
    grammars: Grammars | None = None
    num_scratch: int = 2
    costs: Costs | None = None
    """What is assumed whatever is measured; None measures."""
    decoder: FakeDecoder = field(init=False)
    engine: Engine = field(init=False)
    tokens: dict[RequestKey, list[int]] = field(default_factory=dict)
    logits: list[LogitRows] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.decoder = FakeDecoder(vocab_size=self.limits.vocab_size)
        self.engine = Engine(
            model=self.decoder,
            memory=fake_memory(
                num_blocks=self.limits.num_blocks,
                block_size=self.limits.block_tokens,
                num_slots=self.limits.num_state_slots + self.num_scratch,
            ),
            router=self.router,
            limits=self.limits,
            clock=lambda: self.now,
            wait_timeout_s=1.0,
            grammars=self.grammars,
            fingerprint="fake",
        )
        if self.costs is not None:
            self.engine.requests.costs = self.costs

    def submit(self, message: Submit) -> None:
        self.engine.submit(message, self.now)

    def step(self, held: Collection[RequestKey] = ()) -> StepOutcome:
        self.now += 1.0
        outcome = self.engine.step(self.now, held=held)
        for news in outcome.tokens:
            known = self.tokens.setdefault(RequestKey(news.request_id, news.attempt), [])
            known.extend(news.token_ids)
        self.logits.extend(outcome.logits)
        self.ended.extend(outcome.ended)
        return outcome

    def run_to_end(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if self.engine.num_live == 0:
                break
            self.step()
        self.step()
        assert self.engine.num_live == 0

    def end_of(self, name: str = "r", attempt: int = 0) -> Ended:
        [ended] = [
            e for e in self.ended if RequestKey(e.request_id, e.attempt) == key(name, attempt)
        ]
        return ended

    def assert_memory_is_free(self) -> None:
        stats = self.engine.stats()
        assert (stats.num_used_blocks, stats.num_used_slots) == (0, 0)
        assert stats.num_free_blocks + stats.num_cached_blocks == self.limits.num_blocks
        assert stats.request_copy_bytes == 0
        self.engine.requests.check()
        assert stats.num_free_slots == self.limits.num_state_slots


class FixedCosts(Costs):
    """Costs that measurements do not change."""

    __slots__ = ()

    def measured(self, **_seconds: float | None) -> Costs:
        return self


ALWAYS_COPY = FixedCosts(prefill_s_per_token=1.0, replay_s_per_token=1.0, copy_bytes_per_s=1e12)
NEVER_COPY = FixedCosts(copy_bytes_per_s=1e-9)
