"""Answers to one prompt that share its computation. Blocks of the rig hold 16 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from actors.engine.prompt_sharing import can_share, group_need, split_choices
from actors.request_channel import Sampling
from configs.errors import InvalidRequestError, InvariantError, WorkerError
from configs.numerics import EndReason
from tests.fakes.engine_rig import VOCAB, EngineRig, key, limits, submit
from tests.fakes.fake_decoder import FakeRouter, expected_tokens

PROMPT = [(7 * position) % VOCAB for position in range(40)]
NAMES = ("r", "r.1", "r.2")


def group(max_tokens: int = 6, **changes: object):
    return submit("r", PROMPT, max_tokens, **{"choices": 3, **changes})


def test_choices_have_names_and_draws_of_their_own() -> None:
    message = msgspec.structs.replace(
        group(sampling=Sampling(seed=5, choice=2)), prompt_logprobs=1, logprobs=0
    )
    parts = split_choices(message)
    assert [part.request_id for part in parts] == ["r", "r.1", "r.2"]
    assert [part.sampling.choice for part in parts] == [2, 3, 4]
    assert [part.prompt_logprobs for part in parts] == [1, None, None]
    assert {(part.num_choices, part.logprobs, part.sampling.seed) for part in parts} == {(1, 0, 5)}


@pytest.mark.parametrize(
    ("prompt", "num_blocks", "expected"),
    [(15, 2, 6), (16, 2, 4), (17, 2, 4), (32, 3, 5), (33, 3, 5)],
    ids=["none full", "one full", "one and a bit", "two full", "two and a bit"],
)
def test_only_blocks_that_the_prompt_fills_are_shared(prompt, num_blocks, expected) -> None:
    assert group_need(prompt, num_blocks, 3, 16).num_blocks == expected


@pytest.mark.parametrize(
    ("changes", "credit", "expected"),
    [
        ({"num_state_slots": 3, "num_blocks": 5}, 1, True),
        ({"num_state_slots": 2, "num_blocks": 5}, 1, False),
        ({"num_state_slots": 3, "num_blocks": 4}, 1, False),
        ({"num_state_slots": 3, "num_blocks": 5}, 0, False),
    ],
    ids=["fits", "slots", "blocks", "no credit"],
)
def test_a_group_shares_where_all_fit_and_can_start(changes, credit, expected) -> None:
    assert can_share(group(credit=credit), limits(**changes)) is expected


def test_the_prompt_is_computed_once_and_each_answer_is_that_of_its_own_request() -> None:
    rig = EngineRig()
    rig.submit(group())
    rig.step()
    # 3 blocks of the leader, 1 more for each follower: 2 are full of the prompt.
    assert rig.engine.stats().num_used_blocks == 5
    rig.run_to_end()
    for name in NAMES:
        assert rig.tokens[key(name)] == expected_tokens(PROMPT, 6, VOCAB)
    assert [rig.end_of(name).usage.computed_tokens for name in NAMES] == [40, 0, 0]
    assert rig.engine.stats().prompt_tokens_total == 40
    rig.assert_memory_is_free()


def test_sampled_answers_are_those_of_single_requests_with_the_same_draw() -> None:
    together = EngineRig()
    sampling = Sampling(temperature=30.0, seed=3)
    together.submit(group(sampling=sampling))
    together.run_to_end()
    for choice, name in enumerate(NAMES):
        alone = EngineRig()
        alone.submit(group(sampling=msgspec.structs.replace(sampling, choice=choice), choices=1))
        alone.run_to_end()
        assert together.tokens[key(name)] == alone.tokens[key()]
    assert len({tuple(together.tokens[key(name)]) for name in NAMES}) == 3


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4], ids=lambda steps: f"after {steps} steps")
@pytest.mark.parametrize(
    "gone", [["r"], ["r.1"], ["r", "r.1"], ["r.1", "r.2"], ["r", "r.2"]], ids="+".join
)
def test_who_is_left_goes_on_and_no_prompt_token_is_computed_twice(
    gone: Sequence[str], steps: int
) -> None:
    rig = EngineRig(limits(max_step_tokens=16))
    rig.submit(group())
    for _ in range(steps):
        rig.step()
    for name in gone:
        rig.engine.cancel(key(name), rig.now)
    rig.run_to_end()
    assert {name: rig.end_of(name).reason for name in gone} == dict.fromkeys(
        gone, EndReason.CANCELLED
    )
    for name in set(NAMES) - set(gone):
        assert rig.tokens[key(name)] == expected_tokens(PROMPT, 6, VOCAB)
    assert rig.engine.stats().prompt_tokens_total == 40
    assert sum(rig.end_of(name).usage.computed_tokens for name in NAMES) == 40
    rig.assert_memory_is_free()


def test_a_cancelled_follower_frees_what_is_its_own_alone() -> None:
    rig = EngineRig(limits(max_step_tokens=16))
    rig.submit(group())
    rig.step()
    rig.engine.cancel(key("r.1"), rig.now)
    stats = rig.engine.stats()
    assert (stats.num_used_blocks, stats.num_used_slots) == (4, 2)


def test_without_room_for_all_each_computes_the_prompt_itself() -> None:
    rig = EngineRig(limits(num_state_slots=2))
    rig.submit(group())
    rig.run_to_end()
    for name in NAMES:
        assert rig.tokens[key(name)] == expected_tokens(PROMPT, 6, VOCAB)
        assert rig.end_of(name).usage.computed_tokens == 40
    rig.assert_memory_is_free()


def test_a_group_waits_for_memory_like_one_large_request() -> None:
    rig = EngineRig(limits(num_state_slots=3))
    rig.submit(submit("before", [1], 3))
    rig.step()
    rig.submit(group())
    rig.submit(submit("after", [2], 3))
    rig.step()
    assert (rig.engine.stats().num_running, rig.engine.stats().num_queued) == (1, 4)
    rig.run_to_end()
    ends = [ended.request_id for ended in rig.ended]
    assert ends[0] == "before"
    assert ends[-1] == "after"
    rig.assert_memory_is_free()


def test_choices_without_credit_wait_for_their_own_only() -> None:
    rig = EngineRig()
    rig.submit(group(credit=0))
    rig.engine.credit(key("r.1"), 6)
    for _ in range(10):
        rig.step()
    assert rig.tokens == {key("r.1"): expected_tokens(PROMPT, 6, VOCAB)}
    for name in ("r", "r.2"):
        rig.engine.credit(key(name), 6)
    rig.run_to_end()
    assert rig.tokens[key("r.2")] == expected_tokens(PROMPT, 6, VOCAB)


@pytest.mark.parametrize("num_queued", [0, 2], ids=["no queue", "too short a queue"])
def test_a_full_queue_refuses_all_choices(num_queued: int) -> None:
    rig = EngineRig(limits(num_state_slots=3, max_queued_requests=num_queued))
    rig.submit(submit("running", [1], 50))
    rig.step()
    rig.submit(group())
    rig.step()
    for name in NAMES:
        end = rig.end_of(name)
        assert (end.reason, end.error_code) == (EndReason.REJECTED, "OVERLOADED")
    assert rig.engine.num_live == 1


def test_a_refused_submission_ends_every_choice() -> None:
    rig = EngineRig()
    rig.submit(group(max_tokens=1000))
    rig.step()
    assert {rig.end_of(name).reason for name in NAMES} == {EndReason.REJECTED}


@pytest.mark.parametrize(
    "changes",
    [{"want_logits": True, "max_tokens": 0}, {"generated_ids": [1]}],
    ids=["score", "replay"],
)
def test_scores_and_replays_have_one_choice(changes) -> None:
    rig = EngineRig()
    rig.submit(msgspec.structs.replace(group(), **changes))
    rig.step()
    assert {rig.end_of(name).error_code for name in NAMES} == {"REQUEST_INVALID"}


@pytest.mark.parametrize("live", ["r", "r.2"])
def test_one_live_name_refuses_the_whole_submission(live: str) -> None:
    rig = EngineRig()
    rig.submit(submit(live, [1], 4))
    with pytest.raises(InvalidRequestError, match=f"request {live} attempt 0 is already live"):
        rig.submit(group())
    assert rig.engine.num_live == 1


def test_who_waits_for_a_prompt_fails_with_it() -> None:
    router = FakeRouter(
        fail=lambda step, _lane, _layer: WorkerError("expert-1 is gone") if step == 2 else None
    )
    rig = EngineRig(limits(max_step_tokens=16), router=router)
    rig.submit(group())
    rig.run_to_end()
    assert {rig.end_of(name).error_code for name in NAMES} == {"WORKER_FAILED"}
    rig.assert_memory_is_free()


class _BrokenGrammars:
    """Grammars whose masks cannot be made."""

    is_complete = False

    def matcher(self, _grammar: str) -> _BrokenGrammars:
        return self

    def masks(self, _matchers: object) -> None:
        raise InvariantError("masks are broken")


def test_who_was_forked_in_a_lane_that_fails_afterwards_fails_with_it() -> None:
    rig = EngineRig(grammars=_BrokenGrammars())
    rig.submit(group(grammar="any"))
    rig.run_to_end()
    assert {rig.end_of(name).reason for name in NAMES} == {EndReason.FAILED}
    rig.assert_memory_is_free()
