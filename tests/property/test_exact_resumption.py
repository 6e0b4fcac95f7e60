"""However a request gets its memory, on a real model its logits and tokens are the same bits:
computed cold, begun at a cached prefix, preempted or moved to another engine at any point.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from actors.engine.admission import SnapshotLimits
from actors.engine.request import RequestKey
from actors.request_channel import Sampling, Submit
from actors.snapshots.codec import decode_snapshot, encode_snapshot
from configs.ids import RequestId
from configs.numerics import EndReason
from tests.fakes.engine_rig import ALWAYS_COPY, NEVER_COPY, key
from tests.fakes.real_engine import RealEngine
from tests.fakes.small_model import random_tokens

KEPT = SnapshotLimits(max_bytes=1 << 24, interval_tokens=32, min_gain_tokens=16)
GREEDY = Sampling()
SEEDED = Sampling(temperature=1.0, top_p=0.9, seed=11, repetition_penalty=1.1)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
NUM_PROMPT, NUM_ANSWER = 121, 79
"""A request of 200 tokens."""


def message(
    name: str = "r",
    prompt: list[int] | None = None,
    *,
    num_answer: int = NUM_ANSWER,
    sampling: Sampling = GREEDY,
    attempt: int = 0,
    generated: list[int] | None = None,
) -> Submit:
    return Submit(
        request_id=RequestId(name),
        attempt=attempt,
        token_ids=random_tokens(NUM_PROMPT, seed=3) if prompt is None else prompt,
        max_tokens=num_answer,
        sampling=sampling,
        stop_token_ids=[],
        generated_ids=[] if generated is None else generated,
        logprobs=5,
    )


def run_cold(submit: Submit) -> tuple[list[int], list[object]]:
    rig = RealEngine(num_slots=1)
    rig.submit(submit)
    rig.run()
    name = RequestKey(submit.request_id, submit.attempt)
    return rig.tokens(name), rig.logprobs(name)


@SAMPLINGS
@pytest.mark.parametrize("costs", [ALWAYS_COPY, NEVER_COPY], ids=["copy", "recompute"])
def test_a_request_that_is_preempted_at_every_cut_goes_on_with_the_same_bits(
    sampling, costs
) -> None:
    submit = message(sampling=sampling, num_answer=NUM_ANSWER if costs is ALWAYS_COPY else 12)
    rig = RealEngine(max_step_tokens=16, snapshots=KEPT, costs=costs)
    rig.submit(submit)
    progress = 0
    while rig.engine.num_live:
        rig.step()
        request = rig.engine._table.find(key())
        # As soon as anything is new since the last time.
        if request is not None and request.computed + len(request.generated) > progress:
            progress = request.computed + len(request.generated)
            rig.preempt(key())
    rig.step()
    assert (rig.tokens(key()), rig.logprobs(key())) == run_cold(submit)
    stats = rig.stats
    assert (stats.kept_preemptions_total > 0) == (costs is ALWAYS_COPY)
    rig.assert_memory_is_free()


@SAMPLINGS
@pytest.mark.parametrize("is_copied", [True, False], ids=["copy", "recompute"])
def test_a_request_that_moves_at_every_cut_goes_on_with_the_same_bits(sampling, is_copied) -> None:
    num_answer = NUM_ANSWER if is_copied else 20
    engines = [
        RealEngine(max_step_tokens=16, snapshots=KEPT if is_copied else None, costs=ALWAYS_COPY)
        for _ in range(2)
    ]
    tokens: list[int] = []
    logprobs: list[object] = []
    progress = NUM_PROMPT
    engines[0].submit(message(sampling=sampling, num_answer=num_answer))
    for attempt in range(1000):
        rig, other = engines[attempt % 2], engines[(attempt + 1) % 2]
        name = key(attempt=attempt)
        while rig.engine.is_live(name):
            rig.step()
            request = rig.engine._table.find(name)
            # As soon as anything is new since the last time.
            if request is not None and request.computed + request.num_known > progress:
                progress = request.computed + request.num_known
                break
        tokens += rig.tokens(name)
        logprobs += rig.logprobs(name)
        if not rig.engine.is_live(name):
            break
        snapshot = rig.engine.begin_move(name)
        rig.engine.end_move(name, 0.0)
        assert (snapshot is not None) or not is_copied
        submit = message(
            sampling=sampling, num_answer=num_answer, attempt=attempt + 1, generated=tokens
        )
        arrived = None
        if snapshot is not None and is_copied:
            arrived = decode_snapshot(encode_snapshot(snapshot))
        other.submit(submit, snapshot=arrived)
    assert (tokens, logprobs) == run_cold(message(sampling=sampling, num_answer=num_answer))
    for rig in engines:
        rig.step()
        rig.assert_memory_is_free()
        assert rig.stats.refused_snapshots_total == 0
        assert (rig.stats.restores_total > 0) == is_copied


@SAMPLINGS
@pytest.mark.parametrize(
    ("num_shared", "expected"),
    [(16, 16), (40, 0), (64, 64), (100, 96), (120, 64)],
    ids=["near its end", "short of its end", "at a chunk's end", "near its end later", "interval"],
)
def test_a_request_that_begins_at_a_cached_prefix_has_the_same_bits(
    sampling, num_shared, expected
) -> None:
    shared = random_tokens(NUM_PROMPT, seed=3)[:num_shared]
    first = shared + random_tokens(9, seed=5)
    submit = message("second", shared + random_tokens(60, seed=6), sampling=sampling, num_answer=9)
    rig = RealEngine(snapshots=KEPT)
    rig.submit(message("first", first, num_answer=5))
    rig.run()
    before = rig.stats.prompt_tokens_total
    rig.submit(submit)
    rig.run()
    name = key("second")
    assert (rig.tokens(name), rig.logprobs(name)) == run_cold(submit)
    usage = rig.ended[name].usage
    assert usage.computed_tokens == usage.prompt_tokens - expected
    assert rig.stats.prompt_tokens_total - before == usage.computed_tokens


def test_a_request_in_a_used_slot_equals_it_alone() -> None:
    rig = RealEngine(num_slots=1)
    rig.submit(message("a", random_tokens(90, seed=8), num_answer=12))
    second = message("b", num_answer=12)
    rig.submit(second)
    rig.run()
    assert (rig.tokens(key("b")), rig.logprobs(key("b"))) == run_cold(second)


def test_a_chat_of_three_turns_is_the_same_warm_and_cold_and_computes_only_what_is_new() -> None:
    warm = RealEngine(snapshots=KEPT)
    history: list[int] = []
    last_snapshot = 0
    for turn in range(3):
        history += random_tokens(45, seed=20 + turn)
        submit = message(f"turn-{turn}", list(history), num_answer=10)
        warm.submit(submit)
        warm.run()
        name = key(f"turn-{turn}")
        assert (warm.tokens(name), warm.logprobs(name)) == run_cold(submit)
        usage = warm.ended[name].usage
        assert usage.computed_tokens == len(history) - last_snapshot
        last_snapshot = (len(history) - 1) // 16 * 16
        history += warm.tokens(name)


def story(seed: int) -> None:
    """Random requests in tiny memory, some cancelled, preempted or moved away and back."""
    draw = random.Random(seed)
    rig = RealEngine(
        num_blocks=draw.randint(9, 12),
        num_slots=draw.randint(1, 4),
        max_step_tokens=draw.choice([16, 40, 64]),
        snapshots=SnapshotLimits(
            max_bytes=draw.choice([0, 40_000, 1 << 24]), interval_tokens=32, min_gain_tokens=16
        ),
        costs=draw.choice([ALWAYS_COPY, NEVER_COPY, None]),
    )
    submits = []
    for index in range(5):
        prompt = random_tokens(draw.randint(1, 110), seed=draw.randint(1, 2))
        sampling = draw.choice([GREEDY, SEEDED])
        num_answer = draw.randint(1, 30)
        submits.append(message(f"r{index}", prompt, num_answer=num_answer, sampling=sampling))
    attempts = [0] * len(submits)
    arrivals = {draw.randint(0, 30): [] for _ in submits}
    for index in range(len(submits)):
        arrivals[draw.choice(list(arrivals))].append(index)
    for step in range(2000):
        for index in arrivals.get(step, ()):
            rig.submit(submits[index])
        live = [name for name in rig.engine.live_keys() if rig.engine.is_live(name)]
        if live and draw.random() < 0.15:
            _disturb(draw, rig, draw.choice(live), submits, attempts)
        rig.step()
        if step > 30 and not rig.engine.num_live:
            break
    rig.step()
    rig.assert_memory_is_free()
    for index, submit in enumerate(submits):
        tokens, logprobs = run_cold(submit)
        names = [key(f"r{index}", attempt) for attempt in range(attempts[index] + 1)]
        found = [token for name in names for token in rig.tokens(name)]
        found_logprobs = [one for name in names for one in rig.logprobs(name)]
        end = rig.ended[names[-1]].reason
        num_due = len(tokens) if end is EndReason.FINISHED else len(found)
        assert end in (EndReason.FINISHED, EndReason.CANCELLED)
        assert (found, found_logprobs) == (tokens[:num_due], logprobs[:num_due])


def _disturb(draw, rig, name, submits, attempts) -> None:
    kind = draw.choice(["cancel", "preempt", "preempt", "move", "move"])
    if kind == "cancel":
        rig.engine.cancel(name, 0.0)
    elif kind == "preempt":
        rig.preempt(name)
    else:
        index = int(name.request_id[1:])
        snapshot = rig.engine.begin_move(name)
        rig.engine.end_move(name, 0.0)
        known = [t for a in range(attempts[index] + 1) for t in rig.tokens(key(f"r{index}", a))]
        attempts[index] += 1
        again = msgspec.structs.replace(
            submits[index], attempt=attempts[index], generated_ids=known
        )
        rig.submit(again, snapshot=snapshot if draw.random() < 0.7 else None)


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_in_tiny_memory_have_the_bits_of_each_alone(seed: int) -> None:
    story(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 520))
def test_many_random_requests_in_tiny_memory_have_the_bits_of_each_alone(seed: int) -> None:
    story(seed)
