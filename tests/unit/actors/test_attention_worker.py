"""The engine thread and its gateways."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.attention_worker import HOLD_BACKLOG_BYTES, AttentionWorker
from actors.request_channel import Cancel, Credit
from configs.errors import InvalidRequestError
from configs.ids import GatewayId, WorkerId
from configs.numerics import EndReason
from tests.fakes.engine_rig import VOCAB, EngineRig, key, limits, score, submit
from tests.fakes.fake_decoder import FakeRouter, expected_tokens
from tests.fakes.recording_sink import WAIT_S, RecordingSink

G1, G2 = GatewayId("gateway-1"), GatewayId("gateway-2")
ENDLESS = 200


class Rig:
    """A worker that runs in a thread over a fake decoder."""

    def __init__(self, engine_rig: EngineRig) -> None:
        self.engine_rig = engine_rig
        engine_rig.engine._clock = time.monotonic
        self.worker = AttentionWorker(
            worker=WorkerId("attention-0"), engine=engine_rig.engine, clock=time.monotonic
        )
        self.thread = threading.Thread(target=self.worker.run)

    def settle(self) -> None:
        """Wait until the engine thread has taken in everything said so far."""
        self.worker.call(lambda: None).result(WAIT_S)


@contextmanager
def running(engine_rig: EngineRig | None = None) -> Iterator[Rig]:
    rig = Rig(EngineRig() if engine_rig is None else engine_rig)
    rig.thread.start()
    try:
        yield rig
    finally:
        rig.worker.stop()
        rig.thread.join(WAIT_S)
        assert not rig.thread.is_alive()
        rig.engine_rig.assert_memory_is_free()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with running() as made:
        yield made


def test_each_gateway_hears_of_its_own_requests_only(rig: Rig) -> None:
    first, second = RecordingSink(), RecordingSink()
    rig.worker.connect(G1, first)
    rig.worker.connect(G2, second)
    rig.worker.handle(G1, submit("a", [1], 5))
    rig.worker.handle(G2, submit("b", [2], 5))
    assert first.wait_for_end(key("a")).reason is EndReason.FINISHED
    second.wait_for_end(key("b"))
    assert first.tokens(key("a")) == expected_tokens([1], 5, VOCAB)
    assert second.tokens(key("b")) == expected_tokens([2], 5, VOCAB)
    assert (first.tokens(key("b")), second.tokens(key("a"))) == ([], [])


def test_a_report_carries_the_news_of_all_requests_of_a_step() -> None:
    rig = Rig(EngineRig())
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit("a", [1], 3))
    rig.worker.handle(G1, submit("b", [2], 3))
    rig.thread.start()
    sink.wait_for_end(key("b"))
    rig.worker.stop()
    rig.thread.join(WAIT_S)
    assert [len(report.tokens) for report in sink.reports] == [2, 2, 2]
    assert len(sink.reports[-1].ended) == 2


def test_a_cancelled_request_ends_and_its_memory_is_free(rig: Rig) -> None:
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit("a", [1], ENDLESS, credit=3))
    sink.wait_for_tokens(key("a"), 3)
    rig.worker.handle(G1, Cancel(key("a").request_id, 0))
    assert sink.wait_for_end(key("a")).reason is EndReason.CANCELLED
    assert rig.worker.stats.num_used_blocks == 0


def test_another_gateway_cannot_cancel_a_request(rig: Rig) -> None:
    owner, other = RecordingSink(), RecordingSink()
    rig.worker.connect(G1, owner)
    rig.worker.connect(G2, other)
    rig.worker.handle(G1, submit("a", [1], 4, credit=1))
    owner.wait_for_tokens(key("a"), 1)
    rig.worker.handle(G2, Cancel(key("a").request_id, 0))
    rig.worker.handle(G2, Credit(key("a").request_id, 0, 50))
    rig.settle()
    assert owner.tokens(key("a")) == expected_tokens([1], 1, VOCAB)
    rig.worker.handle(G1, Credit(key("a").request_id, 0, 50))
    assert owner.wait_for_end(key("a")).reason is EndReason.FINISHED


def test_a_gateway_that_vanishes_takes_its_requests_along(rig: Rig) -> None:
    gone, stays = RecordingSink(), RecordingSink()
    rig.worker.connect(G1, gone)
    rig.worker.connect(G2, stays)
    rig.worker.handle(G1, submit("a", [1], ENDLESS, credit=2))
    rig.worker.handle(G2, submit("b", [2], 4, credit=2))
    gone.wait_for_tokens(key("a"), 2)
    stays.wait_for_tokens(key("b"), 2)
    rig.worker.disconnect(G1)
    rig.worker.disconnect(G1)
    rig.settle()
    assert rig.engine_rig.engine.stats().num_running == 1
    rig.worker.handle(G2, Credit(key("b").request_id, 0, 50))
    assert stays.wait_for_end(key("b")).reason is EndReason.FINISHED
    assert gone.ends() == {}


def test_a_deadline_passes_while_the_worker_is_idle(rig: Rig) -> None:
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit("a", [1], ENDLESS, credit=1, timeout_s=0.05))
    assert sink.wait_for_end(key("a")).reason is EndReason.DEADLINE


def test_a_duplicate_of_a_live_request_is_ignored(rig: Rig) -> None:
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit("a", [1], 4, credit=1))
    rig.worker.handle(G1, submit("a", [9, 9], 4))
    rig.worker.handle(G1, Credit(key("a").request_id, 0, 50))
    assert sink.wait_for_end(key("a")).reason is EndReason.FINISHED
    assert sink.tokens(key("a")) == expected_tokens([1], 4, VOCAB)


def test_each_choice_of_a_submission_is_credited_cancelled_and_ended_on_its_own(rig: Rig) -> None:
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit("a", [1], 4, credit=1, choices=3))
    for name in ("a", "a.1", "a.2"):
        sink.wait_for_tokens(key(name), 1)
    rig.worker.handle(G1, Cancel(key("a").request_id, 0))
    rig.worker.handle(G1, Credit(key("a.1").request_id, 0, 50))
    assert sink.wait_for_end(key("a")).reason is EndReason.CANCELLED
    assert sink.wait_for_end(key("a.1")).reason is EndReason.FINISHED
    assert sink.tokens(key("a.1")) == expected_tokens([1], 4, VOCAB)
    assert rig.engine_rig.engine.is_live(key("a.2"))


@pytest.mark.parametrize(
    ("live", "late"),
    [("a.1", submit("a", [9], 4, choices=2)), ("a", submit("a", [9], 4, choices=2))],
    ids=["a follower's name", "its own name"],
)
def test_a_submission_with_one_live_name_is_ignored_as_a_whole(rig: Rig, live, late) -> None:
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit(live, [1], 4, credit=1))
    rig.worker.handle(G1, late)
    rig.worker.handle(G1, Credit(key(live).request_id, 0, 50))
    assert sink.wait_for_end(key(live)).reason is EndReason.FINISHED
    assert sink.tokens(key(live)) == expected_tokens([1], 4, VOCAB)
    rig.settle()
    assert rig.engine_rig.engine.stats().ended_requests_total == 1


def test_a_message_of_an_unknown_gateway_is_dropped(rig: Rig) -> None:
    rig.worker.handle(G1, submit("a"))
    rig.settle()
    assert rig.engine_rig.engine.num_live == 0


def test_a_draining_worker_finishes_and_refuses(rig: Rig) -> None:
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit("old", [1], 4, credit=1))
    sink.wait_for_tokens(key("old"), 1)
    rig.worker.drain()
    assert not rig.worker.is_drained
    rig.worker.handle(G1, submit("new", [1], 4))
    end = sink.wait_for_end(key("new"))
    assert (end.reason, end.error_code) == (EndReason.REJECTED, "NO_WORKER")
    rig.worker.handle(G1, Credit(key("old").request_id, 0, 50))
    assert sink.wait_for_end(key("old")).reason is EndReason.FINISHED
    assert rig.worker.is_drained


def test_stopping_ends_every_request_with_a_retryable_failure() -> None:
    sink = RecordingSink()
    with running(EngineRig(limits(num_state_slots=1))) as rig:
        rig.worker.connect(G1, sink)
        rig.worker.handle(G1, submit("running", [1], 9, credit=1))
        rig.worker.handle(G1, submit("queued", [1], 9))
        sink.wait_for_tokens(key("running"), 1)
    assert {end.error_code for end in sink.ends().values()} == {"SHUTTING_DOWN"}
    assert len(sink.ends()) == 2


def test_a_request_that_is_in_the_inbox_when_the_worker_stops_gets_its_end() -> None:
    rig = Rig(EngineRig())
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, submit("a"))
    rig.worker.stop()
    rig.worker.run()
    assert sink.ends()[key("a")].reason is EndReason.FAILED


def test_an_unforeseen_error_in_a_step_fails_its_requests_and_the_worker_goes_on() -> None:
    router = FakeRouter(fail=lambda step, *_: RuntimeError("bug") if step == 1 else None)
    with running(EngineRig(router=router)) as rig:
        sink = RecordingSink()
        rig.worker.connect(G1, sink)
        rig.worker.handle(G1, submit("a"))
        end = sink.wait_for_end(key("a"))
        assert (end.reason, end.error_code) == (EndReason.FAILED, "WORKER_FAILED")
        assert "RuntimeError: bug" in end.error_message
        rig.worker.handle(G1, submit("b"))
        assert sink.wait_for_end(key("b")).reason is EndReason.FINISHED


def test_a_score_is_held_while_its_gateway_does_not_read(rig: Rig) -> None:
    sink = RecordingSink()
    sink.backlog_bytes = HOLD_BACKLOG_BYTES + 1
    rig.worker.connect(G1, sink)
    rig.worker.handle(G1, score("s", [1] * 5))
    rig.settle()
    rig.settle()
    assert sink.reports == []
    sink.backlog_bytes = 0
    rig.worker.wake()
    assert sink.wait_for_end(key("s")).reason is EndReason.FINISHED


def test_a_sink_that_fails_loses_its_gateway_only(rig: Rig) -> None:
    class BrokenSink(RecordingSink):
        def send(self, report: object) -> None:
            raise OSError("no space")

    sink = RecordingSink()
    rig.worker.connect(G1, BrokenSink())
    rig.worker.connect(G2, sink)
    rig.worker.handle(G1, submit("a", [1], ENDLESS))
    rig.worker.handle(G2, submit("b", [2], 4))
    assert sink.wait_for_end(key("b")).reason is EndReason.FINISHED
    rig.settle()
    assert rig.engine_rig.engine.num_live == 0


def test_an_action_runs_on_the_engine_thread_and_its_result_comes_back(rig: Rig) -> None:
    future = rig.worker.call(threading.current_thread)
    assert future.result(WAIT_S) is rig.thread


def test_an_error_of_an_action_comes_back_to_its_caller(rig: Rig) -> None:
    def fail() -> None:
        raise ValueError("no such placement")

    with pytest.raises(ValueError, match="no such placement"):
        rig.worker.call(fail).result(WAIT_S)
    rig.settle()


def test_the_welcome_states_what_fits(rig: Rig) -> None:
    rig.worker.set_generation(3)
    welcome = rig.worker.welcome
    assert (welcome.worker, welcome.generation, welcome.max_request_tokens) == (
        "attention-0",
        3,
        256,
    )


class _SlowGrammars:
    """Grammars that take until they are let go, and allow everything."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.may_go_on = threading.Event()

    def matcher(self, grammar: str) -> OpenMatcher:
        self.is_asked.set()
        assert self.may_go_on.wait(WAIT_S)
        if grammar == "bad":
            raise InvalidRequestError("no such grammar")
        if grammar == "broken":
            raise RuntimeError("bug")
        return OpenMatcher()

    def masks(self, matchers: Sequence[object]) -> NDArray[np.bool_]:
        return np.ones((len(matchers), VOCAB), dtype=np.bool_)


class OpenMatcher:
    """Allows every token, for ever."""

    is_complete = False
    error = ""

    def advance(self, token_id: int) -> None:
        """Take it."""


@pytest.fixture
def grammars() -> _SlowGrammars:
    return _SlowGrammars()


@pytest.fixture
def slow_rig(grammars: _SlowGrammars) -> Iterator[Rig]:
    with running(EngineRig(grammars=grammars)) as made:
        yield made
        grammars.may_go_on.set()


def test_others_go_on_while_a_grammar_is_made(slow_rig: Rig, grammars: _SlowGrammars) -> None:
    sink = RecordingSink()
    slow_rig.worker.connect(G1, sink)
    slow_rig.worker.handle(G1, submit("slow", [3], 4, grammar="g", choices=2))
    assert grammars.is_asked.wait(WAIT_S)
    slow_rig.worker.handle(G1, submit("other", [1], 5))
    assert sink.wait_for_end(key("other")).reason is EndReason.FINISHED
    assert key("slow") not in sink.ends()
    grammars.may_go_on.set()
    for name in ("slow", "slow.1"):
        assert sink.wait_for_end(key(name)).reason is EndReason.FINISHED
        assert sink.tokens(key(name)) == expected_tokens([3], 4, VOCAB)


def test_a_request_can_be_cancelled_while_its_grammar_is_made(
    slow_rig: Rig, grammars: _SlowGrammars
) -> None:
    sink = RecordingSink()
    slow_rig.worker.connect(G1, sink)
    slow_rig.worker.handle(G1, submit("slow", [3], ENDLESS, grammar="g", credit=0))
    assert grammars.is_asked.wait(WAIT_S)
    slow_rig.worker.handle(G1, Cancel("slow", 0))
    grammars.may_go_on.set()
    assert sink.wait_for_end(key("slow")).reason is EndReason.CANCELLED


def test_its_deadline_runs_while_its_grammar_is_made(
    slow_rig: Rig, grammars: _SlowGrammars
) -> None:
    sink = RecordingSink()
    slow_rig.worker.connect(G1, sink)
    slow_rig.worker.handle(G1, submit("slow", [3], 4, grammar="g", timeout_s=0.0))
    assert grammars.is_asked.wait(WAIT_S)
    grammars.may_go_on.set()
    assert sink.wait_for_end(key("slow")).reason is EndReason.DEADLINE


@pytest.mark.parametrize(
    ("grammar", "code", "text"),
    [
        pytest.param("bad", "REQUEST_INVALID", "no such grammar", id="refused"),
        pytest.param("broken", "WORKER_FAILED", "RuntimeError: bug", id="broken"),
    ],
)
def test_a_grammar_that_cannot_be_made_rejects_its_request(
    slow_rig: Rig, grammars: _SlowGrammars, grammar: str, code: str, text: str
) -> None:
    sink = RecordingSink()
    grammars.may_go_on.set()
    slow_rig.worker.connect(G1, sink)
    slow_rig.worker.handle(G1, submit("a", grammar=grammar))
    end = sink.wait_for_end(key("a"))
    assert (end.reason, end.error_code) == (EndReason.REJECTED, code)
    assert text in end.error_message


def test_a_gateway_that_leaves_takes_along_what_waits_for_a_grammar(
    slow_rig: Rig, grammars: _SlowGrammars
) -> None:
    sink = RecordingSink()
    slow_rig.worker.connect(G1, sink)
    slow_rig.worker.handle(G1, submit("slow", [3], ENDLESS, grammar="g"))
    assert grammars.is_asked.wait(WAIT_S)
    slow_rig.worker.disconnect(G1)
    slow_rig.settle()
    grammars.may_go_on.set()
    slow_rig.worker.connect(G2, sink)
    slow_rig.worker.handle(G2, submit("next", grammar="g"))
    assert sink.wait_for_end(key("next")).reason is EndReason.FINISHED
    assert slow_rig.engine_rig.engine.num_live == 0


def test_stopping_ends_what_waits_for_a_grammar(grammars: _SlowGrammars) -> None:
    sink = RecordingSink()
    with running(EngineRig(grammars=grammars)) as rig:
        rig.worker.connect(G1, sink)
        rig.worker.handle(G1, submit("first", [3], ENDLESS, grammar="g"))
        assert grammars.is_asked.wait(WAIT_S)
        rig.worker.handle(G1, submit("second", [3], ENDLESS, grammar="g"))
        rig.worker.stop()
        grammars.may_go_on.set()
        for name in ("first", "second"):
            assert sink.wait_for_end(key(name)).error_code == "SHUTTING_DOWN"
