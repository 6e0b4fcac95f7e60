"""The engine over a decoder that detects wrong memory."""

from __future__ import annotations

import numpy as np
import pytest

from actors.request_channel import Sampling, Submit
from configs.errors import InvalidRequestError, TransportTimeoutError, WorkerError
from configs.numerics import EndReason, FinishReason
from tests.fakes.engine_rig import VOCAB, EngineRig, key, limits, score, submit
from tests.fakes.fake_decoder import FakeRouter, expected_tokens


def test_a_request_gives_its_tokens_and_one_end() -> None:
    rig = EngineRig()
    rig.submit(submit(prompt=[5, 6, 7], max_tokens=6))
    rig.run_to_end()
    assert rig.tokens[key()] == expected_tokens([5, 6, 7], 6, VOCAB)
    end = rig.end_of()
    assert (end.reason, end.finish_reason) == (EndReason.FINISHED, FinishReason.LENGTH)
    assert (end.usage.prompt_tokens, end.usage.computed_tokens, end.usage.output_tokens) == (
        3,
        3,
        6,
    )
    rig.assert_memory_is_free()


def test_requests_together_give_the_tokens_of_each_alone() -> None:
    rig = EngineRig(limits(max_step_tokens=32, num_state_slots=3))
    prompts = {f"r{i}": [i + 1] * (3 + 13 * i) for i in range(6)}
    for name, prompt in prompts.items():
        rig.submit(submit(name, prompt, 9))
    rig.run_to_end()
    for name, prompt in prompts.items():
        assert rig.tokens[key(name)] == expected_tokens(prompt, 9, VOCAB)
    rig.assert_memory_is_free()


@pytest.mark.parametrize("budget", [16, 17, 33, 48, 200])
def test_tokens_do_not_depend_on_the_chunk_size(budget: int) -> None:
    rig = EngineRig(limits(max_step_tokens=budget))
    prompt = [i % VOCAB for i in range(100)]
    rig.submit(submit(prompt=prompt, max_tokens=5))
    rig.run_to_end()
    assert rig.tokens[key()] == expected_tokens(prompt, 5, VOCAB)


def test_a_stop_token_ends_the_request_and_is_its_last_token() -> None:
    expected = expected_tokens([9, 9], 8, VOCAB)
    first_use = expected.index(expected[3])
    rig = EngineRig()
    rig.submit(submit(prompt=[9, 9], max_tokens=8, stop=[expected[3]]))
    rig.run_to_end()
    assert rig.tokens[key()] == expected[: first_use + 1]
    assert rig.end_of().finish_reason is FinishReason.STOP


def test_decode_and_prefill_run_in_two_lanes_of_one_step() -> None:
    rig = EngineRig()
    rig.submit(submit("a"))
    rig.step()
    rig.submit(submit("b"))
    rig.router.events.clear()
    rig.step()
    assert rig.router.events[:2] == [("begin", 0, 0), ("begin", 1, 0)]
    decode, prefill = rig.decoder.batches[-2:]
    assert [s.is_decode for s in decode.segments] == [True]
    assert [s.is_decode for s in prefill.segments] == [False]


def test_a_cancelled_request_is_free_at_once_and_ends_once() -> None:
    rig = EngineRig()
    rig.submit(submit(max_tokens=50))
    rig.step()
    rig.engine.cancel(key(), rig.now)
    rig.assert_memory_is_free()
    rig.engine.cancel(key(), rig.now)
    rig.step()
    assert rig.end_of().reason is EndReason.CANCELLED


@pytest.mark.parametrize("steps_before", [0, 1, 2, 4], ids=["queued", "prefill", "late", "decode"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "discard"])
def test_every_phase_can_be_left_and_frees_its_memory(steps_before: int, how: str) -> None:
    rig = EngineRig(limits(max_step_tokens=16))
    timeout = steps_before + 0.5 if how == "deadline" else None
    rig.submit(submit(prompt=[3] * 40, max_tokens=30, timeout_s=timeout))
    for _ in range(steps_before):
        rig.step()
    if how == "cancel":
        rig.engine.cancel(key(), rig.now)
    elif how == "discard":
        rig.engine.discard(key(), rig.now)
    rig.step()
    rig.assert_memory_is_free()
    reasons = [end.reason for end in rig.ended]
    assert (
        reasons
        == {
            "cancel": [EndReason.CANCELLED],
            "deadline": [EndReason.DEADLINE],
            "discard": [],
        }[how]
    )


def test_the_next_deadline_is_the_earliest_of_all_live_requests() -> None:
    rig = EngineRig(limits(num_state_slots=1))
    assert rig.engine.next_deadline() is None
    rig.submit(submit("a", timeout_s=9.0))
    rig.submit(submit("b", timeout_s=5.0))
    rig.submit(submit("c"))
    assert rig.engine.next_deadline() == 5.0


def test_without_credit_a_request_pauses_and_goes_on_with_more() -> None:
    rig = EngineRig()
    rig.submit(submit(max_tokens=6, credit=2))
    for _ in range(5):
        rig.step()
    assert len(rig.tokens[key()]) == 2
    assert rig.step().num_computed_tokens == 0
    rig.engine.credit(key(), 3)
    for _ in range(5):
        rig.step()
    assert len(rig.tokens[key()]) == 5
    rig.engine.credit(key(), 100)
    rig.run_to_end()
    assert rig.tokens[key()] == expected_tokens([1, 2, 3], 6, VOCAB)


def test_a_held_request_computes_nothing() -> None:
    rig = EngineRig()
    rig.submit(submit())
    assert rig.step(held={key()}).num_computed_tokens == 0
    assert rig.step().num_computed_tokens == 3


def test_a_later_attempt_replays_and_continues_with_equal_tokens() -> None:
    prompt, expected = [4] * 20, expected_tokens([4] * 20, 30, VOCAB)
    rig = EngineRig(limits(max_step_tokens=16))
    rig.submit(submit(prompt=prompt, max_tokens=30, attempt=2, generated=expected[:21]))
    rig.run_to_end()
    assert rig.tokens[key(attempt=2)] == expected[21:]
    assert rig.end_of(attempt=2).usage.output_tokens == 30
    assert rig.engine.stats().replayed_tokens_total == 20
    forms = [(s.position, s.is_decode) for b in rig.decoder.batches for s in b.segments]
    assert all(is_decode == (position >= 20) for position, is_decode in forms)


@pytest.mark.parametrize(
    ("stop", "finish"),
    [([], FinishReason.LENGTH), ([7], FinishReason.STOP)],
    ids=["length", "stop"],
)
def test_an_attempt_that_was_complete_ends_without_computing(
    stop: list[int], finish: FinishReason
) -> None:
    rig = EngineRig()
    rig.submit(submit(max_tokens=2, generated=[3, 7], stop=stop, attempt=1))
    rig.step()
    assert rig.end_of(attempt=1).finish_reason is finish
    assert rig.decoder.batches == []


def test_a_score_returns_the_logits_of_every_prompt_position() -> None:
    prompt = [(7 * i) % VOCAB for i in range(45)]
    rig = EngineRig(limits(max_step_tokens=16))
    rig.submit(score("s", prompt))
    rig.run_to_end()
    assert [(rows.first_position, rows.num_rows) for rows in rig.logits] == [
        (0, 16),
        (16, 16),
        (32, 13),
    ]
    data = np.frombuffer(b"".join(rows.data for rows in rig.logits), "<f4").reshape(45, VOCAB)
    expected = [expected_tokens(prompt[: i + 1], 1, VOCAB)[0] for i in range(45)]
    assert data.argmax(axis=1).tolist() == expected
    end = rig.end_of("s")
    assert (end.reason, end.usage.output_tokens) == (EndReason.FINISHED, 0)
    assert rig.tokens == {}
    rig.assert_memory_is_free()


def test_a_score_and_a_request_share_a_prefill_lane() -> None:
    rig = EngineRig()
    rig.submit(score("s", [1] * 10))
    rig.submit(submit("r", [2] * 10, 3))
    rig.run_to_end()
    assert rig.tokens[key()] == expected_tokens([2] * 10, 3, VOCAB)
    assert sum(rows.num_rows for rows in rig.logits) == 10


REFUSALS = {
    "empty prompt": (submit(prompt=[]), "REQUEST_INVALID", "token_ids is empty"),
    "id too high": (submit(prompt=[1, VOCAB]), "REQUEST_INVALID", r"token_ids[1] is 61"),
    "id negative": (submit(prompt=[-1]), "REQUEST_INVALID", r"token_ids[0] is -1"),
    "stop id": (submit(stop=[999]), "REQUEST_INVALID", "stop_token_ids[0] is 999"),
    "replayed id": (submit(generated=[999]), "REQUEST_INVALID", "generated_ids[0] is 999"),
    "max_tokens 0": (submit(max_tokens=0), "REQUEST_INVALID", "max_tokens is 0"),
    "max_tokens negative": (submit(max_tokens=-5), "REQUEST_INVALID", "max_tokens is -5"),
    "context": (submit(prompt=[1] * 200, max_tokens=57), "REQUEST_INVALID", "context is 256"),
    "temperature": (
        submit(sampling=Sampling(temperature=float("nan"))),
        "REQUEST_INVALID",
        "temperature is nan",
    ),
    "top_p": (submit(sampling=Sampling(top_p=0.0)), "REQUEST_INVALID", "top_p is 0.0"),
    "top_k": (submit(sampling=Sampling(top_k=-1)), "REQUEST_INVALID", "top_k is -1"),
    "seed": (submit(sampling=Sampling(seed=-1)), "REQUEST_INVALID", "seed is -1"),
    "timeout": (submit(timeout_s=float("inf")), "REQUEST_INVALID", "timeout_s is inf"),
    "credit": (submit(credit=-1), "REQUEST_INVALID", "credit_tokens is -1"),
    "attempt": (submit(attempt=-1), "REQUEST_INVALID", "attempt is -1"),
    "no choices": (submit(choices=0), "REQUEST_INVALID", "num_choices is 0"),
}


@pytest.mark.parametrize(("message", "code", "text"), list(REFUSALS.values()), ids=list(REFUSALS))
def test_a_bad_request_is_refused_with_the_reason(message: Submit, code: str, text: str) -> None:
    rig = EngineRig()
    rig.submit(message)
    rig.step()
    [end] = rig.ended
    assert (end.reason, end.error_code) == (EndReason.REJECTED, code)
    assert text in end.error_message
    assert rig.engine.num_live == 0


def test_a_score_computes_to_its_credit_and_pauses_while_others_go_on() -> None:
    rig = EngineRig()
    rig.submit(score("s", [1] * 40, credit=16))
    rig.step()
    rig.submit(submit("g", [1] * 20, 4))
    while not rig.ended:
        rig.step()
    assert rig.end_of("g").reason is EndReason.FINISHED
    assert [(rows.first_position, rows.num_rows) for rows in rig.logits] == [(0, 16)]
    for credit in (16, 8):
        rig.engine.credit(key("s"), credit)
        rig.step()
    assert [(rows.first_position, rows.num_rows) for rows in rig.logits] == [
        (0, 16),
        (16, 16),
        (32, 8),
    ]
    assert rig.end_of("s").reason is EndReason.FINISHED
    rig.assert_memory_is_free()


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.DEADLINE])
def test_a_paused_score_keeps_its_memory_until_it_ends(reason: EndReason) -> None:
    rig = EngineRig()
    rig.submit(score("s", [1] * 40, timeout_s=10.0, credit=16))
    for _ in range(5):
        rig.step()
    assert rig.engine.stats().num_used_slots == 1
    if reason is EndReason.CANCELLED:
        rig.engine.cancel(key("s"), rig.now)
    for _ in range(6):
        rig.step()
    assert rig.end_of("s").reason is reason
    rig.assert_memory_is_free()


def test_a_score_with_max_tokens_is_refused() -> None:
    rig = EngineRig()
    message = score("s", [1])
    rig.submit(
        Submit(
            request_id=message.request_id,
            attempt=0,
            token_ids=[1],
            max_tokens=1,
            sampling=Sampling(),
            stop_token_ids=[],
            want_logits=True,
        )
    )
    rig.step()
    assert rig.end_of("s").error_code == "REQUEST_INVALID"


def test_a_request_that_can_never_fit_memory_is_refused_at_once() -> None:
    rig = EngineRig(limits(num_blocks=4))
    rig.submit(submit("fits", [1] * 60, 4))
    rig.submit(submit("large", [1] * 60, 5))
    rig.run_to_end()
    assert rig.end_of("fits").reason is EndReason.FINISHED
    assert rig.end_of("large").error_code == "REQUEST_TOO_LARGE"


def test_a_full_queue_refuses_what_could_not_start_at_once() -> None:
    rig = EngineRig(limits(num_state_slots=2, max_queued_requests=1))
    for name in "abcd":
        rig.submit(submit(name))
    rig.run_to_end()
    assert [rig.end_of(name).reason for name in "abc"] == [EndReason.FINISHED] * 3
    assert rig.end_of("d").error_code == "OVERLOADED"


def test_without_a_queue_a_request_runs_when_there_is_room() -> None:
    rig = EngineRig(limits(num_state_slots=1, max_queued_requests=0))
    rig.submit(submit("a"))
    rig.submit(submit("b"))
    rig.run_to_end()
    assert rig.end_of("a").reason is EndReason.FINISHED
    assert rig.end_of("b").reason is EndReason.REJECTED


def test_a_duplicate_of_a_live_request_raises_and_leaves_it_alone() -> None:
    rig = EngineRig()
    rig.submit(submit())
    with pytest.raises(InvalidRequestError, match="already live"):
        rig.submit(submit())
    rig.run_to_end()
    assert rig.end_of().reason is EndReason.FINISHED


def test_two_attempts_of_a_request_are_two_requests() -> None:
    rig = EngineRig()
    rig.submit(submit(attempt=0))
    rig.submit(submit(attempt=1))
    rig.run_to_end()
    assert rig.tokens[key(attempt=0)] == rig.tokens[key(attempt=1)]


def test_a_failed_lane_ends_exactly_its_requests() -> None:
    failing: set[int] = set()
    router = FakeRouter(
        fail=lambda step, lane, _layer: (
            WorkerError("expert-1 is gone") if step in failing and lane == 0 else None
        )
    )
    rig = EngineRig(router=router)
    rig.submit(submit("decoding", max_tokens=9))
    rig.step()
    rig.submit(submit("prefilling", [8] * 5, 4))
    failing.add(2)
    rig.step()
    assert rig.end_of("decoding").error_code == "WORKER_FAILED"
    assert router.num_abandoned == 1
    rig.run_to_end()
    assert rig.tokens[key("prefilling")] == expected_tokens([8] * 5, 4, VOCAB)
    assert rig.engine.stats().failed_lanes_total == 1
    rig.assert_memory_is_free()


def test_a_timeout_fails_the_lane_and_the_engine_goes_on() -> None:
    answers = iter([None])
    router = FakeRouter(choose=lambda open_: next(answers, open_[0]))
    rig = EngineRig(router=router)
    rig.submit(submit("late"))
    rig.step()
    assert rig.end_of("late").error_code == TransportTimeoutError.code
    rig.submit(submit("next"))
    rig.run_to_end()
    assert rig.end_of("next").reason is EndReason.FINISHED
    rig.assert_memory_is_free()


def test_an_unforeseen_error_loses_the_running_requests_only() -> None:
    broken: set[int] = {1}
    router = FakeRouter(
        fail=lambda step, *_: RuntimeError("bug") if step in broken else None,
    )
    rig = EngineRig(limits(num_state_slots=1), router=router)
    rig.submit(submit("running"))
    rig.submit(submit("queued"))
    with pytest.raises(RuntimeError, match="bug"):
        rig.step()
    rig.engine.fail_running(WorkerError("a step failed"), rig.now)
    rig.run_to_end()
    assert rig.end_of("running").reason is EndReason.FAILED
    assert rig.end_of("queued").reason is EndReason.FINISHED
    rig.assert_memory_is_free()


def test_all_requests_can_be_failed() -> None:
    rig = EngineRig(limits(num_state_slots=1))
    rig.submit(submit("a"))
    rig.submit(submit("b"))
    rig.step()
    rig.engine.fail_all(WorkerError("stopping"), rig.now)
    rig.step()
    assert [rig.end_of(name).reason for name in "ab"] == [EndReason.FAILED] * 2
    rig.assert_memory_is_free()


def test_seeded_sampling_gives_equal_tokens_however_requests_are_batched() -> None:
    hot = Sampling(temperature=5.0, seed=7)
    alone, crowd = EngineRig(), EngineRig(limits(max_step_tokens=16))
    alone.submit(submit("r", [1] * 30, 12, sampling=hot))
    alone.run_to_end()
    for name in ("a", "b"):
        crowd.submit(submit(name, [2] * 20, 12, sampling=Sampling(temperature=3.0, seed=1)))
    crowd.submit(submit("r", [1] * 30, 12, sampling=hot))
    crowd.run_to_end()
    assert alone.tokens[key()] == crowd.tokens[key()]


def test_statistics_count_what_was_done() -> None:
    rig = EngineRig()
    rig.submit(submit("a", [1] * 5, 3))
    rig.submit(submit("b", [1] * 7, 2))
    rig.run_to_end()
    stats = rig.engine.stats()
    assert (stats.prompt_tokens_total, stats.generated_tokens_total) == (12, 5)
    assert (stats.ended_requests_total, stats.num_running, stats.num_queued) == (2, 0, 0)
    assert stats.steps_total == 3


def test_usage_tells_waiting_first_token_and_total_time() -> None:
    rig = EngineRig(limits(num_state_slots=1))
    rig.submit(submit("a", max_tokens=3))
    rig.submit(submit("b", max_tokens=2))
    rig.run_to_end()
    usage = rig.end_of("b").usage
    assert (usage.queue_s, usage.first_token_s, usage.total_s) == (4.0, 4.0, 5.0)
