"""Reuse of prefixes, preemption with and without copies, and moves, in tiny memory and any order:
every request ends once, its tokens are those of a request that runs alone, nothing is left.

The fake decoder raises when a step reads memory that is not the request's own, or of another form.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.engine.admission import SnapshotLimits
from actors.engine.request import RequestKey
from configs.ids import RequestId
from configs.numerics import EndReason
from tests.fakes.engine_rig import ALWAYS_COPY, NEVER_COPY, VOCAB, EngineRig, limits, score, submit
from tests.fakes.fake_decoder import expected_tokens

SLOT_BYTES = 4 * 4 + 3 * 4
"""Of the fake's memory."""


@dataclass(frozen=True)
class Arrival:
    step: int
    family: int
    """Prompts of a family begin alike."""
    prompt: int
    max_tokens: int
    priority: int
    is_score: bool
    credit: int
    cancel_after: int | None
    move_after: int | None
    is_copied: bool
    """Whether the move takes its memory along."""


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        family=st.integers(0, 2),
        prompt=st.integers(1, 90),
        max_tokens=st.integers(1, 40),
        priority=st.sampled_from([0, 0, 0, -1, 5]),
        is_score=st.sampled_from([False, False, False, True]),
        credit=st.sampled_from([0, 3, 100, 100]),
        cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 40)),
        move_after=st.one_of(st.none(), st.integers(0, 40)),
        is_copied=st.booleans(),
    ),
    min_size=1,
    max_size=14,
)
memories = st.builds(
    lambda pool, slots, step: {
        "block_tokens": pool[0],
        "num_blocks": pool[1],
        "num_state_slots": slots,
        "max_step_tokens": step,
    },
    st.sampled_from([(16, n) for n in range(9, 17)] + [(32, 5), (32, 7), (64, 3), (64, 4)]),
    st.integers(1, 5),
    st.integers(16, 70),
)
rules = st.builds(
    SnapshotLimits,
    max_bytes=st.sampled_from([0, SLOT_BYTES, 5 * SLOT_BYTES, 10_000]),
    interval_tokens=st.sampled_from([16, 32, 2048]),
    min_gain_tokens=st.sampled_from([1, 16, 40]),
)


class Story:
    """Runs arrivals on one engine; moved requests come back to it as the next attempt."""

    def __init__(self, rig: EngineRig, arrivals: list[Arrival]) -> None:
        self.rig = rig
        self.arrivals = arrivals
        self.attempts = [0] * len(arrivals)
        self.received: list[list[int]] = [[] for _ in arrivals]
        self.rows: list[list[int]] = [[] for _ in arrivals]

    def run(self) -> None:
        for step in range(4000):
            for index, arrival in enumerate(self.arrivals):
                self._act(step, index, arrival)
            outcome = self.rig.step()
            for news in outcome.tokens:
                self.received[int(news.request_id)].extend(news.token_ids)
            for news in outcome.logits:
                first = news.first_position
                self.rows[int(news.request_id)].extend(range(first, first + news.num_rows))
            self.rig.engine.requests.check()
            if step > 75 and self.rig.engine.num_live == 0:
                break
        self.rig.step()

    def key(self, index: int) -> RequestKey:
        return RequestKey(RequestId(str(index)), self.attempts[index])

    def _act(self, step: int, index: int, arrival: Arrival) -> None:
        engine = self.rig.engine
        if step == arrival.step:
            self.rig.submit(self.message(index, arrival))
        if arrival.cancel_after is not None and step == arrival.step + arrival.cancel_after:
            engine.cancel(self.key(index), self.rig.now)
        if arrival.move_after is not None and step == arrival.step + arrival.move_after:
            self._move(index, arrival)
        engine.credit(self.key(index), 1)

    def _move(self, index: int, arrival: Arrival) -> None:
        engine, key = self.rig.engine, self.key(index)
        if not engine.is_live(key):
            return
        snapshot = engine.begin_move(key)
        engine.end_move(key, self.rig.now)
        self.attempts[index] += 1
        self.rows[index].clear()
        engine.submit(
            self.message(index, arrival),
            self.rig.now,
            snapshot=snapshot if arrival.is_copied else None,
        )

    def message(self, index: int, arrival: Arrival):
        prompt = prompt_of(arrival.family, index, arrival.prompt)
        attempt = self.attempts[index]
        if arrival.is_score:
            message = score(str(index), prompt, credit=arrival.credit)
        else:
            message = submit(
                str(index),
                prompt,
                arrival.max_tokens,
                attempt=attempt,
                credit=arrival.credit,
                generated=self.received[index],
            )
        return type(message)(
            **{name: getattr(message, name) for name in message.__struct_fields__}
            | {"priority": arrival.priority, "attempt": attempt}
        )


def prompt_of(family: int, index: int, length: int) -> list[int]:
    """Alike in a family but for the last tokens, which differ by request."""
    shared = [(family * 17 + position * 5) % VOCAB for position in range(length)]
    return shared[:-3] + [(token + index) % VOCAB for token in shared[-3:]]


def check_story(arrivals, memory, rule, costs) -> EngineRig:
    rig = EngineRig(limits(**memory, snapshots=rule), costs=costs)
    story = Story(rig, arrivals)
    story.run()
    rig.assert_memory_is_free()
    for index, arrival in enumerate(arrivals):
        ends = [e for e in rig.ended if e.request_id == str(index)]
        assert [e.attempt for e in ends] == list(range(story.attempts[index] + 1))
        assert all(e.reason is EndReason.MOVED for e in ends[:-1])
        prompt = prompt_of(arrival.family, index, arrival.prompt)
        full = expected_tokens(prompt, arrival.max_tokens, VOCAB)
        if arrival.is_score:
            if ends[-1].reason is EndReason.FINISHED:
                assert story.rows[index] == list(range(arrival.prompt))
            continue
        assert story.received[index] == full[: len(story.received[index])]
        if ends[-1].reason is EndReason.FINISHED:
            assert story.received[index] == full
        else:
            assert ends[-1].reason is EndReason.CANCELLED
    return rig


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arrivals=arrivals,
    memory=memories,
    rule=rules,
    costs=st.sampled_from([ALWAYS_COPY, NEVER_COPY, None]),
)
def test_tokens_never_depend_on_reuse_preemption_or_moves(arrivals, memory, rule, costs) -> None:
    check_story(arrivals, memory, rule, costs)


@pytest.mark.parametrize("costs", [ALWAYS_COPY, NEVER_COPY], ids=["copies", "recomputes"])
def test_memory_for_one_serves_many_that_grow_and_ends(costs) -> None:
    many = [Arrival(0, i % 3, 30, 40, 0, False, 100, None, None, False) for i in range(6)]
    memory = {"num_blocks": 9, "num_state_slots": 5, "max_step_tokens": 64}
    rig = check_story(many, memory, SnapshotLimits(max_bytes=10_000), costs)
    stats = rig.engine.stats()
    kept, dropped = stats.kept_preemptions_total, stats.dropped_preemptions_total
    assert (kept > 0, dropped > 0) == (costs is ALWAYS_COPY, costs is NEVER_COPY)
