import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.request_channel import Cancel, Credit, Ended, LogitRows, Sampling, Submit, Usage
from cluster.api.request_stream import CREDIT_TOKENS, RequestStream, row_window
from configs.errors import (
    DeadlineError,
    InvariantError,
    OverloadedError,
    RequestCancelledError,
    WorkerError,
)
from configs.ids import RequestId
from configs.numerics import EndReason, FinishReason


class Desk:
    """A stream and everything that it told others."""

    def __init__(self, max_tokens=10_000, num_rows=0, credit=CREDIT_TOKENS):
        self.posted = []
        self.settled = []
        self.closed = []
        submit = Submit(
            request_id=RequestId("g-1"),
            attempt=1,
            token_ids=[1] * max(num_rows, 1),
            max_tokens=0 if num_rows else max_tokens,
            sampling=Sampling(seed=7),
            stop_token_ids=[],
            credit_tokens=credit,
            want_logits=num_rows > 0,
        )
        self.stream = RequestStream(
            submit,
            post=self.posted.append,
            on_settled=self.settled.append,
            on_closed=self.closed.append,
        )

    def end(self, reason=EndReason.FINISHED, **kwargs):
        if reason is EndReason.FINISHED:
            kwargs.setdefault("finish_reason", FinishReason.LENGTH)
        self.stream.put_end(Ended(RequestId("g-1"), 1, reason, Usage(output_tokens=3), **kwargs))


@pytest.mark.asyncio
async def test_tokens_that_came_since_the_last_look_are_one_piece():
    desk = Desk()
    desk.stream.put_tokens([1])
    desk.stream.put_tokens([2, 3])
    assert (await desk.stream.next_news()).token_ids == [1, 2, 3]


@pytest.mark.asyncio
async def test_end_comes_with_the_last_tokens():
    desk = Desk()
    desk.stream.put_tokens([1])
    desk.end()
    news = await desk.stream.next_news()
    assert (news.token_ids, news.outcome.reason) == ([1], EndReason.FINISHED)


@pytest.mark.asyncio
async def test_no_credit_is_granted_while_nobody_reads():
    desk = Desk()
    desk.stream.put_tokens([0] * CREDIT_TOKENS)
    assert desk.posted == []


@pytest.mark.asyncio
async def test_credit_is_granted_for_what_was_read_once_more_is_wanted():
    desk = Desk()
    desk.stream.put_tokens([0] * CREDIT_TOKENS)
    await desk.stream.next_news()
    assert desk.posted == []
    waiting = asyncio.create_task(desk.stream.next_news())
    await asyncio.sleep(0)
    assert desk.posted == [Credit(RequestId("g-1"), 1, CREDIT_TOKENS)]
    desk.end()
    await waiting


@pytest.mark.asyncio
async def test_no_credit_is_granted_to_a_request_that_ended():
    desk = Desk()
    desk.stream.put_tokens([0] * CREDIT_TOKENS)
    await desk.stream.next_news()
    desk.end()
    await desk.stream.next_news()
    assert desk.posted == []


@pytest.mark.asyncio
async def test_last_piece_of_credit_is_what_is_left_of_the_answer():
    desk = Desk(max_tokens=CREDIT_TOKENS + 3)
    desk.stream.put_tokens([0, 0, 0])
    await desk.stream.next_news()
    waiting = asyncio.create_task(desk.stream.next_news())
    await asyncio.sleep(0)
    assert desk.posted == [Credit(RequestId("g-1"), 1, 3)]
    desk.end()
    await waiting


@pytest.mark.asyncio
async def test_worker_that_exceeds_its_credit_loses_the_request():
    desk = Desk()
    desk.stream.put_tokens([0] * (CREDIT_TOKENS + 1))
    news = await desk.stream.next_news()
    assert isinstance(news.outcome.error, InvariantError)
    assert news.token_ids == []
    assert desk.posted == [Cancel(RequestId("g-1"), 1)]


@pytest.mark.asyncio
async def test_reader_that_leaves_cancels_the_request_at_its_worker():
    desk = Desk()
    desk.stream.close()
    assert desk.posted == [Cancel(RequestId("g-1"), 1)]
    assert [outcome.reason for outcome in desk.settled] == [EndReason.CANCELLED]
    assert desk.closed == [desk.stream]


@pytest.mark.asyncio
async def test_reader_that_leaves_late_ends_the_request_by_deadline():
    desk = Desk()
    desk.stream.close(is_late=True)
    assert [type(outcome.error) for outcome in desk.settled] == [DeadlineError]


@pytest.mark.asyncio
async def test_leaving_after_the_end_cancels_nothing():
    desk = Desk()
    desk.end()
    desk.stream.close()
    assert desk.posted == []
    assert len(desk.settled) == 1


@pytest.mark.asyncio
async def test_tokens_after_the_reader_left_are_dropped():
    desk = Desk()
    desk.stream.close()
    desk.stream.put_tokens([1])
    desk.end()
    assert [outcome.reason for outcome in desk.settled] == [EndReason.CANCELLED]


@pytest.mark.asyncio
async def test_failure_reaches_a_waiting_reader():
    desk = Desk()
    waiting = asyncio.create_task(desk.stream.next_news())
    await asyncio.sleep(0)
    desk.stream.fail(WorkerError("gone"))
    async with asyncio.timeout(5):
        assert isinstance((await waiting).outcome.error, WorkerError)


@pytest.mark.parametrize(
    ("reason", "code", "cls"),
    [
        (EndReason.CANCELLED, "", RequestCancelledError),
        (EndReason.DEADLINE, "", DeadlineError),
        (EndReason.REJECTED, "OVERLOADED", OverloadedError),
        (EndReason.FAILED, "WORKER_FAILED", WorkerError),
    ],
    ids=["cancelled", "deadline", "rejected", "failed"],
)
@pytest.mark.asyncio
async def test_end_of_the_worker_becomes_its_exception(reason, code, cls):
    desk = Desk()
    desk.end(reason, error_code=code, error_message="why" if code else "")
    outcome = (await desk.stream.next_news()).outcome
    assert (outcome.reason, type(outcome.error)) == (reason, cls)


@pytest.mark.asyncio
async def test_credit_granted_between_two_workers_goes_along_with_the_next_attempt():
    desk = Desk()
    desk.stream.put_tokens([0] * CREDIT_TOKENS)
    await desk.stream.next_news()
    desk.stream.detach(Usage())
    waiting = asyncio.create_task(desk.stream.next_news())
    await asyncio.sleep(0)
    posted = []
    submit = desk.stream.attach(posted.append, takes_snapshot=True)
    assert (submit.attempt, submit.credit_tokens) == (2, CREDIT_TOKENS)
    assert submit.generated_ids == [0] * CREDIT_TOKENS
    desk.stream.put_tokens([1])
    assert (await waiting).token_ids == [1]
    desk.stream.close()
    assert (desk.posted, posted) == ([], [Cancel(RequestId("g-1"), 2)])


@pytest.mark.asyncio
async def test_answer_that_becomes_whole_between_two_workers_ends_at_once():
    desk = Desk()
    desk.stream.put_tokens([1])
    desk.stream.detach(Usage())
    desk.stream.complete()
    assert not desk.stream.needs_worker
    outcome = (await desk.stream.next_news()).outcome
    assert (outcome.reason, outcome.error) == (EndReason.FINISHED, None)
    assert outcome.usage.output_tokens == 1


@pytest.mark.asyncio
async def test_whole_answer_whose_worker_is_lost_needs_no_other_one():
    desk = Desk()
    desk.stream.complete()
    assert not desk.stream.needs_worker
    desk.stream.fail(WorkerError("gone"))
    assert [outcome.reason for outcome in desk.settled] == [EndReason.FINISHED]


@pytest.mark.asyncio
async def test_request_whose_deadline_passes_between_two_workers_ends_by_it():
    desk = Desk()
    desk.stream.detach(Usage())
    desk.stream.expire()
    assert isinstance((await desk.stream.next_news()).outcome.error, DeadlineError)
    assert desk.posted == []


@pytest.mark.asyncio
async def test_rows_that_are_computed_again_cost_no_credit_and_are_not_told_again():
    desk = Desk(num_rows=100, credit=32)
    desk.stream.put_rows(rows_of(0, 20))
    desk.stream.put_rows(rows_of(0, 16))
    desk.stream.put_rows(rows_of(16, 16))
    news = await desk.stream.next_news()
    assert [(rows.first_position, rows.num_rows) for rows in news.rows] == [(0, 20), (20, 12)]
    assert news.outcome is None


def rows_of(position, num_rows):
    return LogitRows(RequestId("g-1"), 1, position, num_rows, bytes(4 * num_rows))


@pytest.mark.asyncio
async def test_rows_within_the_credit_wait_for_the_reader():
    desk = Desk(num_rows=100, credit=32)
    desk.stream.put_rows(rows_of(0, 16))
    desk.stream.put_rows(rows_of(16, 16))
    assert desk.posted == []
    assert [rows.first_position for rows in (await desk.stream.next_news()).rows] == [0, 16]


@pytest.mark.asyncio
async def test_rows_are_granted_on_the_grid_until_the_prompt_ends():
    desk = Desk(num_rows=50, credit=32)
    for position, num_rows in ((0, 16), (16, 16), (32, 16), (48, 2)):
        desk.stream.put_rows(rows_of(position, num_rows))
        assert (await desk.stream.next_news()).outcome is None
        waiting = asyncio.create_task(desk.stream.next_news())
        await asyncio.sleep(0)
        waiting.cancel()
    assert [message.num_tokens for message in desk.posted] == [16, 2]


@pytest.mark.asyncio
async def test_worker_that_exceeds_the_credit_of_a_score_loses_the_request():
    desk = Desk(num_rows=100, credit=32)
    desk.stream.put_rows(rows_of(0, 33))
    news = await desk.stream.next_news()
    assert isinstance(news.outcome.error, InvariantError)
    assert (news.rows, news.outcome.usage.output_tokens) == ([], 0)
    assert desk.posted == [Cancel(RequestId("g-1"), 1)]


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [(64, 32768), (100_000, 16), (163_840, 16), (40_000, 48), (10_000_000, 16)],
    ids=["tiny", "large", "real", "middle", "huge"],
)
def test_row_window_is_some_megabytes_on_the_grid(vocab_size, expected):
    assert row_window(vocab_size) == expected


@settings(deadline=None)
@given(
    max_tokens=st.integers(1, 4 * CREDIT_TOKENS),
    pieces=st.lists(st.integers(1, CREDIT_TOKENS), min_size=1, max_size=40),
)
def test_reader_gets_every_token_and_the_worker_is_never_further_ahead_than_the_credit(
    max_tokens, pieces
):
    asyncio.run(_run_worker(max_tokens, pieces))


async def _run_worker(max_tokens, pieces):
    desk = Desk(max_tokens)
    num_sent = num_read = 0
    turn = 0
    while num_read < max_tokens:
        reading = asyncio.create_task(desk.stream.next_news())
        await asyncio.sleep(0)
        granted = CREDIT_TOKENS + sum(message.num_tokens for message in desk.posted)
        piece = min(pieces[turn % len(pieces)], granted - num_sent, max_tokens - num_sent)
        turn += 1
        assert piece > 0
        desk.stream.put_tokens(list(range(num_sent, num_sent + piece)))
        num_sent += piece
        assert num_sent - num_read <= CREDIT_TOKENS
        async with asyncio.timeout(5):
            news = await reading
        assert news.outcome is None
        assert news.token_ids == list(range(num_read, num_sent))
        num_read = num_sent


@settings(deadline=None)
@given(
    events=st.lists(
        st.sampled_from(["finish", "fail", "close", "late", "tokens", "overrun"]), max_size=12
    )
)
def test_request_is_settled_at_most_once_and_always_once_its_reader_left(events):
    asyncio.run(_play(events))


async def _play(events):
    desk = Desk()
    actions = {
        "finish": desk.end,
        "fail": lambda: desk.stream.fail(WorkerError("gone")),
        "close": desk.stream.close,
        "late": lambda: desk.stream.close(is_late=True),
        "tokens": lambda: desk.stream.put_tokens([1]),
        "overrun": lambda: desk.stream.put_tokens([1] * (CREDIT_TOKENS + 1)),
    }
    for event in events:
        actions[event]()
        assert len(desk.settled) <= 1
    desk.stream.close()
    assert len(desk.settled) == len(desk.closed) == 1
