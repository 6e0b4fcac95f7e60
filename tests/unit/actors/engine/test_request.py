"""One request's own bookkeeping."""

from __future__ import annotations

import pytest

from actors.engine.choosing import TokenChoice
from actors.engine.request import EngineRequest, Phase
from configs.numerics import FinishReason
from tests.fakes.engine_rig import score, submit


def make_of(message, *, credit: int = 9) -> EngineRequest:
    return EngineRequest(
        submit=message,
        arrived_at=0.0,
        number=0,
        choice=TokenChoice(message, None),
        deadline=None,
        credit=credit,
    )


def make(**changes: object) -> EngineRequest:
    values = {"prompt": [10, 11, 12], "max_tokens": 4, **changes}
    return make_of(submit(**values))


@pytest.mark.parametrize(
    ("position", "num_tokens", "expected"),
    [
        (0, 2, [10, 11]),
        (3, 1, [20]),
        (4, 1, [21]),
        (2, 3, [12, 20, 21]),
        (0, 5, [10, 11, 12, 20, 21]),
    ],
    ids=["prompt", "first generated", "generated", "both", "all"],
)
def test_tokens_run_through_prompt_and_answer(
    position: int, num_tokens: int, expected: list[int]
) -> None:
    request = make()
    request.generated = [20, 21]
    assert request.tokens(position, num_tokens) == expected


def test_phases_follow_what_is_owned_and_computed() -> None:
    request = make()
    phases = [request.phase]
    request.slot = 0
    phases.append(request.phase)
    request.computed = 3
    request.append_token(20, now=1.0)
    phases.append(request.phase)
    request.is_ended = True
    phases.append(request.phase)
    assert phases == [Phase.QUEUED, Phase.PREFILL, Phase.DECODE, Phase.ENDED]


def test_a_replaying_request_is_in_prefill_until_it_has_caught_up() -> None:
    request = make()
    request.slot, request.computed, request.generated = 0, 3, [20, 21]
    assert request.phase is Phase.PREFILL
    request.computed = 4
    assert request.phase is Phase.DECODE


def test_a_token_costs_credit_and_the_first_sets_the_time() -> None:
    request = make()
    request.append_token(20, now=2.0)
    request.append_token(21, now=3.0)
    assert (request.credit, request.first_token_at) == (7, 2.0)


def test_only_the_last_token_can_stop_an_answer() -> None:
    request = make(stop=[20])
    request.generated = [20, 21]
    assert request.find_finish() is None
    request.generated = [21, 20]
    assert request.find_finish() is FinishReason.STOP


def test_a_score_never_finishes_by_tokens() -> None:
    request = make_of(score("s", [1]), credit=0)
    assert request.find_finish() is None


def test_a_score_pays_credit_for_its_rows() -> None:
    request = make_of(score("s", [1] * 40), credit=16)
    request.take_progress(16, step=3)
    assert (request.computed, request.credit, request.is_paused) == (16, 0, True)


def test_a_prompt_to_answer_costs_no_credit() -> None:
    request = make_of(submit(prompt=[1] * 40), credit=4)
    request.take_progress(16, step=3)
    assert (request.computed, request.credit) == (16, 4)
