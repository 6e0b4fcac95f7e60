"""Several answers to one prompt: whatever is cancelled or late, each answer ends once, its tokens
are those of a request of its own, memory returns to baseline, and a prompt that can be shared is
computed once.

The fake decoder raises when a step reads memory that is not the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.prompt_sharing import can_share
from actors.request_channel import choice_id
from configs.errors import WorkerError
from configs.numerics import EndReason
from tests.fakes.engine_rig import VOCAB, EngineRig, key, limits, submit
from tests.fakes.fake_decoder import FakeRouter, expected_tokens


@dataclass(frozen=True)
class Group:
    step: int
    prompt: int
    max_tokens: int
    choices: int
    credit: int
    timeout: int | None
    cancels: tuple[tuple[int, int], ...]
    """(choice, steps after its arrival)."""


def groups(*, is_calm: bool):
    never = st.none()
    return st.lists(
        st.builds(
            Group,
            step=st.integers(0, 20),
            prompt=st.integers(1, 70),
            max_tokens=st.integers(1, 12),
            choices=st.integers(1, 5),
            credit=st.just(100) if is_calm else st.sampled_from([0, 1, 3, 100]),
            timeout=never if is_calm else st.one_of(never, st.integers(0, 40)),
            cancels=st.just(())
            if is_calm
            else st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), max_size=4).map(tuple),
        ),
        min_size=1,
        max_size=6,
    )


memories = st.tuples(st.integers(2, 14), st.integers(1, 5), st.integers(16, 50))


def prompt_of(index: int, length: int) -> list[int]:
    return [(index * 17 + position * 5) % VOCAB for position in range(length)]


def message_of(index: int, group: Group):
    return submit(
        f"g{index}",
        prompt_of(index, group.prompt),
        group.max_tokens,
        timeout_s=None if group.timeout is None else group.timeout + 0.5,
        credit=group.credit,
        choices=group.choices,
    )


def choice_key(index: int, choice: int):
    return key(choice_id(f"g{index}", choice))


def run(arrivals, memory, failing=frozenset()):
    num_blocks, num_slots, budget = memory
    rig = EngineRig(
        limits(num_blocks=num_blocks, num_state_slots=num_slots, max_step_tokens=budget),
        router=FakeRouter(
            fail=lambda step, lane, _layer: WorkerError("gone") if (step, lane) in failing else None
        ),
    )
    for step in range(2000):
        for index, group in enumerate(arrivals):
            if group.step == step:
                rig.submit(message_of(index, group))
            for choice, after in group.cancels:
                if group.step + after == step and choice < group.choices:
                    rig.engine.cancel(choice_key(index, choice), rig.now)
            for choice in range(group.choices):
                rig.engine.credit(choice_key(index, choice), 1)
        rig.step()
        if step > max(group.step for group in arrivals) and rig.engine.num_live == 0:
            break
    rig.step()
    rig.assert_memory_is_free()
    return rig


@settings(max_examples=80, deadline=None)
@given(
    arrivals=groups(is_calm=False),
    memory=memories,
    failing=st.sets(st.tuples(st.integers(1, 40), st.integers(0, 1)), max_size=2),
)
def test_every_answer_ends_once_with_the_tokens_of_a_request_of_its_own(arrivals, memory, failing):
    rig = run(arrivals, memory, failing)
    wanted = [choice_key(i, c) for i, g in enumerate(arrivals) for c in range(g.choices)]
    ends = {key(e.request_id, e.attempt): e for e in rig.ended}
    assert sorted(ends) == sorted(wanted)
    assert len(rig.ended) == len(wanted)
    for index, group in enumerate(arrivals):
        expected = expected_tokens(prompt_of(index, group.prompt), group.max_tokens, VOCAB)
        for choice in range(group.choices):
            name = choice_key(index, choice)
            tokens = rig.tokens.get(name, [])
            assert tokens == expected[: len(tokens)]
            if ends[name].reason is EndReason.FINISHED:
                assert tokens == expected


@settings(max_examples=60, deadline=None)
@given(arrivals=groups(is_calm=True), memory=memories)
def test_a_prompt_that_can_be_shared_is_computed_once(arrivals, memory):
    rig = run(arrivals, memory)
    num_expected = 0
    ends = {key(e.request_id, e.attempt): e for e in rig.ended}
    for index, group in enumerate(arrivals):
        message = message_of(index, group)
        reasons = {ends[choice_key(index, c)].reason for c in range(group.choices)}
        if reasons == {EndReason.REJECTED}:
            continue
        assert reasons == {EndReason.FINISHED}
        is_shared = group.choices == 1 or can_share(message, rig.limits)
        num_computed = 1 if is_shared else group.choices
        num_expected += num_computed * group.prompt
        usages = [ends[choice_key(index, c)].usage for c in range(group.choices)]
        assert sum(usage.computed_tokens for usage in usages) == num_computed * group.prompt
        assert {usage.prompt_tokens for usage in usages} == {group.prompt}
    # Again only for those that had to make room for others.
    stats = rig.engine.stats()
    has_recomputed = stats.dropped_preemptions_total > 0
    assert has_recomputed or stats.prompt_tokens_total == num_expected
