"""Whatever arrives, and whatever is cancelled, late or out of credit: every request ends once, its
tokens are those of a request that runs alone, and memory returns to baseline.

The fake decoder raises when a step reads memory that is not the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import WorkerError
from configs.numerics import EndReason
from tests.fakes.engine_rig import VOCAB, EngineRig, key, limits, score, submit
from tests.fakes.fake_decoder import FakeRouter, expected_tokens


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    max_tokens: int
    replayed: int
    is_score: bool
    credit: int
    timeout: int | None
    cancel_after: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt=st.integers(1, 70),
        max_tokens=st.integers(1, 20),
        replayed=st.integers(0, 12),
        is_score=st.booleans(),
        credit=st.sampled_from([0, 1, 3, 100]),
        timeout=st.one_of(st.none(), st.integers(0, 40)),
        cancel_after=st.one_of(st.none(), st.integers(0, 25)),
    ),
    min_size=1,
    max_size=12,
)


def prompt_of(index: int, length: int) -> list[int]:
    return [(index * 17 + position * 5) % VOCAB for position in range(length)]


@settings(max_examples=60, deadline=None)
@given(
    arrivals=arrivals,
    num_blocks=st.integers(2, 8),
    num_slots=st.integers(1, 4),
    budget=st.integers(16, 50),
    queue=st.integers(0, 6),
    failing=st.sets(st.tuples(st.integers(1, 60), st.integers(0, 1)), max_size=3),
    slow=st.randoms(use_true_random=False),
)
def test_everything_ends_once_with_the_right_tokens_and_no_memory(
    arrivals: list[Arrival], num_blocks, num_slots, budget, queue, failing, slow
) -> None:
    router = FakeRouter(
        choose=slow.choice,
        fail=lambda step, lane, _layer: WorkerError("gone") if (step, lane) in failing else None,
    )
    rig = EngineRig(
        limits(
            num_blocks=num_blocks,
            num_state_slots=num_slots,
            max_step_tokens=budget,
            max_queued_requests=queue,
        ),
        router=router,
    )
    by_step: dict[int, list[tuple[int, Arrival]]] = {}
    for index, arrival in enumerate(arrivals):
        by_step.setdefault(arrival.step, []).append((index, arrival))
    for step in range(2000):
        for index, arrival in by_step.pop(step, []):
            send(rig, index, arrival)
        for index, arrival in enumerate(arrivals):
            name = f"r{index}"
            if arrival.cancel_after is not None and step == arrival.step + arrival.cancel_after:
                rig.engine.cancel(key(name), rig.now)
            rig.engine.credit(key(name), 1)
        rig.step()
        if not by_step and rig.engine.num_live == 0:
            break
    rig.step()
    rig.assert_memory_is_free()
    for index, arrival in enumerate(arrivals):
        check(rig, index, arrival)


def send(rig: EngineRig, index: int, arrival: Arrival) -> None:
    prompt = prompt_of(index, arrival.prompt)
    if arrival.is_score:
        rig.submit(score(f"r{index}", prompt, timeout_s=arrival.timeout, credit=arrival.credit))
        return
    full = expected_tokens(prompt, arrival.max_tokens, VOCAB)
    rig.submit(
        submit(
            f"r{index}",
            prompt,
            arrival.max_tokens,
            credit=arrival.credit,
            timeout_s=arrival.timeout,
            generated=full[: arrival.replayed],
        )
    )


def check(rig: EngineRig, index: int, arrival: Arrival) -> None:
    name = f"r{index}"
    end = rig.end_of(name)
    prompt = prompt_of(index, arrival.prompt)
    if arrival.is_score:
        rows = sum(r.num_rows for r in rig.logits if r.request_id == name)
        assert rows == arrival.prompt or end.reason is not EndReason.FINISHED
        return
    expected = expected_tokens(prompt, arrival.max_tokens, VOCAB)[arrival.replayed :]
    got = rig.tokens.get(key(name), [])
    assert got == expected[: len(got)]
    if end.reason is EndReason.FINISHED:
        assert got == expected
        assert end.usage.output_tokens == arrival.max_tokens
