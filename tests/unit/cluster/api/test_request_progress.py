import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.request_channel import (
    LogitRows,
    PromptLogprobs,
    Sampling,
    Submit,
    TokenLogprobs,
    Usage,
)
from cluster.api.request_progress import RequestProgress, choice_submit
from configs.ids import RequestId
from tests.fakes.fake_attention_worker import place_of

NAME = RequestId("g-1")


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    """A clock that stands still until it is moved."""
    return Clock()


def submit_of(**changes):
    values = {
        "request_id": NAME,
        "attempt": 1,
        "token_ids": [1, 2, 3, 4, 5],
        "max_tokens": 100,
        "sampling": Sampling(seed=7, choice=1),
        "stop_token_ids": [2],
        "credit_tokens": 32,
    }
    return Submit(**{**values, **changes})


def rows_of(first, num_rows):
    data = np.repeat(np.arange(first, first + num_rows, dtype="<f4"), 3).tobytes()
    return LogitRows(NAME, 1, first, num_rows, data)


def prompt_logprobs_of(first, end):
    return PromptLogprobs(NAME, 1, first, [TokenLogprobs(float(i)) for i in range(first, end)])


def test_next_attempt_carries_the_tokens_and_the_credit_that_is_left(clock):
    progress = RequestProgress(submit_of(), clock=clock)
    progress.take_tokens([8, 9])
    progress.num_granted += 10
    following = progress.begin_attempt(takes_snapshot=True)
    assert (following.attempt, following.generated_ids) == (2, [8, 9])
    assert following.credit_tokens == 32 + 10 - 2
    assert following.snapshot is None
    assert (following.sampling, following.request_id) == (Sampling(seed=7, choice=1), NAME)


def test_every_attempt_carries_all_tokens_so_far(clock):
    progress = RequestProgress(submit_of(), clock=clock)
    progress.take_tokens([8])
    progress.begin_attempt(takes_snapshot=True)
    progress.take_tokens([9])
    following = progress.begin_attempt(takes_snapshot=True)
    assert (following.attempt, following.generated_ids) == (3, [8, 9])
    assert following.credit_tokens == 30


def test_last_snapshot_goes_along_unless_it_is_gone(clock):
    progress = RequestProgress(submit_of(), clock=clock)
    progress.snapshot = place_of("b")
    assert progress.begin_attempt(takes_snapshot=True).snapshot == place_of("b")
    assert progress.begin_attempt(takes_snapshot=False).snapshot is None


def test_deadline_is_what_is_left_of_it(clock):
    progress = RequestProgress(submit_of(timeout_s=10.0), clock=clock)
    clock.now += 4
    assert progress.begin_attempt(takes_snapshot=True).timeout_s == 6.0
    clock.now += 7
    assert progress.time_left_s == 0


def test_score_pays_for_its_rows_again_and_takes_no_snapshot(clock):
    score = submit_of(max_tokens=0, want_logits=True)
    progress = RequestProgress(score, clock=clock)
    progress.snapshot = place_of("b")
    progress.take_rows(rows_of(0, 3))
    following = progress.begin_attempt(takes_snapshot=True)
    assert (following.credit_tokens, following.generated_ids) == (32, [])
    assert following.snapshot is None


@pytest.mark.parametrize(
    ("first", "num_rows", "kept"),
    [(0, 3, None), (1, 2, None), (0, 5, (3, 2)), (2, 4, (3, 3)), (3, 2, (3, 2))],
    ids=["same", "inside", "longer", "overlapping", "next"],
)
def test_rows_that_came_before_are_left_out(clock, first, num_rows, kept):
    progress = RequestProgress(submit_of(max_tokens=0, want_logits=True), clock=clock)
    progress.take_rows(rows_of(0, 3))
    expected = None if kept is None else rows_of(*kept)
    assert progress.take_rows(rows_of(first, num_rows)) == expected
    assert progress.num_received == (3 if kept is None else sum(kept))


@settings(deadline=None)
@given(cuts=st.lists(st.lists(st.integers(1, 5), max_size=6), max_size=4))
def test_rows_of_all_attempts_are_each_row_once_in_order(cuts):
    progress = RequestProgress(submit_of(max_tokens=0, want_logits=True))
    seen = []
    for pieces in cuts:
        first = 0
        for num_rows in pieces:
            fresh = progress.take_rows(rows_of(first, num_rows))
            if fresh is not None:
                assert fresh == rows_of(fresh.first_position, fresh.num_rows)
                seen.extend(range(fresh.first_position, fresh.first_position + fresh.num_rows))
            first += num_rows
    assert seen == list(range(max((sum(pieces) for pieces in cuts), default=0)))


def test_prompt_logprobs_are_asked_for_until_all_are_there(clock):
    progress = RequestProgress(submit_of(prompt_logprobs=2), clock=clock)
    assert progress.take_prompt_logprobs(prompt_logprobs_of(1, 3)) == prompt_logprobs_of(1, 3)
    assert progress.begin_attempt(takes_snapshot=True).prompt_logprobs == 2
    assert progress.take_prompt_logprobs(prompt_logprobs_of(1, 2)) is None
    assert progress.take_prompt_logprobs(prompt_logprobs_of(2, 5)) == prompt_logprobs_of(3, 5)
    assert progress.begin_attempt(takes_snapshot=True).prompt_logprobs is None


def test_choice_of_a_group_is_a_request_of_its_own():
    group = submit_of(num_choices=3, prompt_logprobs=0)
    assert choice_submit(group, 0).request_id == NAME
    third = choice_submit(group, 2)
    assert (third.request_id, third.num_choices, third.sampling.choice) == ("g-1.2", 1, 3)
    assert third.prompt_logprobs is None
    assert choice_submit(group, 0).prompt_logprobs == 0


def test_usage_of_one_attempt_is_the_workers(clock):
    usage = Usage(5, 5, 9, queue_s=0.1, first_token_s=0.2, total_s=0.3)
    assert RequestProgress(submit_of(), clock=clock).whole_usage(usage) == usage


def test_times_of_a_moved_request_count_from_its_first_arrival(clock):
    progress = RequestProgress(submit_of(), clock=clock)
    clock.now += 2
    progress.take_tokens([8])
    clock.now += 3
    progress.leave(Usage(queue_s=0.5))
    progress.begin_attempt(takes_snapshot=True)
    usage = progress.whole_usage(Usage(5, 0, 9, queue_s=0.25, first_token_s=0.2, total_s=1.0))
    assert usage == Usage(5, 0, 9, queue_s=0.75, first_token_s=2.0, total_s=6.0)


def test_first_token_of_a_later_attempt_counts_the_time_before(clock):
    progress = RequestProgress(submit_of(), clock=clock)
    clock.now += 3
    progress.begin_attempt(takes_snapshot=True)
    clock.now += 1
    progress.take_tokens([8])
    usage = progress.whole_usage(Usage(first_token_s=1.0, total_s=2.0))
    assert (usage.first_token_s, usage.total_s) == (4.0, 5.0)
