"""Requests that leave a worker, and what gateways are told besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actors.request_channel import (
    CacheFlushed,
    Cancel,
    Draining,
    FlushCache,
    PrefixNews,
)
from actors.request_mover import MAX_MOVING
from configs.errors import SnapshotError
from configs.ids import GatewayId
from configs.numerics import EndReason
from tests.fakes.engine_rig import VOCAB, key, submit
from tests.fakes.fake_decoder import expected_tokens
from tests.fakes.moving_rig import G1, G2, PROMPT, MovingRig
from tests.fakes.recording_sink import RecordingSink


@pytest.fixture
def rig() -> Iterator[MovingRig]:
    made = MovingRig()
    yield made
    made.worker._grammars.close()


def eight() -> MovingRig:
    rig = MovingRig(num_state_slots=8, num_blocks=64)
    for index in range(8):
        rig.worker.handle(G1, submit(f"r{index}", [index, 5, 7], 50))
    rig.rounds(5)
    return rig


def test_moving_out_ends_each_once_with_its_copy_before_its_end_and_leaves_nothing() -> None:
    rig = eight()
    rig.worker.move_out()
    rig.rounds()
    num_answered = 0
    while num_answered < len(rig.outlet.sent):
        assert len(rig.outlet.sent) - num_answered <= MAX_MOVING
        rig.outlet.answer(num_answered)
        num_answered += 1
        rig.rounds()
    ends = rig.sink.ends()
    assert {name.request_id for name in ends} == {f"r{index}" for index in range(8)}
    assert {end.reason for end in ends.values()} == {EndReason.MOVED}
    for report in rig.sink.reports:
        saved = {one.request_id: one.place for one in report.saved}
        assert saved.keys() == {one.request_id for one in report.ended}
    for index in range(8):
        tokens = rig.sink.tokens(key(f"r{index}"))
        assert tokens == expected_tokens([index, 5, 7], len(tokens), VOCAB)
    positions = {name: copy.position for copy, name, _ in rig.outlet.sent}
    for index in range(8):
        assert positions[f"r{index}"] == 3 + len(rig.sink.tokens(key(f"r{index}"))) - 1
    rig.assert_empty()


def test_the_others_go_on_while_two_are_on_their_way() -> None:
    rig = eight()
    rig.worker.move_out()
    rig.rounds()
    counts = [len(rig.sink.tokens(key(f"r{index}"))) for index in range(8)]
    rig.rounds(3)
    later = [len(rig.sink.tokens(key(f"r{index}"))) for index in range(8)]
    assert [b - a for a, b in zip(counts, later, strict=True)] == [0, 0, 3, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("kind", ["refuses", "fails"])
def test_an_outlet_that_does_not_take_copies_delays_nobody(kind: str) -> None:
    rig = eight()
    rig.outlet.is_refusing = kind == "refuses"
    rig.worker.move_out()
    rig.rounds()
    for index in range(0 if kind == "refuses" else 8):
        rig.outlet.answer(index, SnapshotError("no room there"))
        rig.rounds()
    ends = rig.sink.ends()
    assert len(ends) == 8
    assert {end.reason for end in ends.values()} == {EndReason.MOVED}
    assert [one for report in rig.sink.reports for one in report.saved] == []
    rig.assert_empty()


def test_moving_out_again_sends_nothing_twice() -> None:
    rig = eight()
    rig.worker.move_out()
    rig.rounds()
    rig.worker.move_out()
    rig.rounds()
    for index in range(8):
        rig.outlet.answer(index)
        rig.rounds()
    names = [name for _, name, _ in rig.outlet.sent]
    assert sorted(names) == sorted(set(names))
    rig.assert_empty()


@pytest.mark.parametrize("is_late", [False, True], ids=["never answered", "answered after"])
def test_one_that_is_cancelled_on_its_way_ends_once_and_is_not_saved(is_late: bool) -> None:
    rig = MovingRig()
    rig.say(submit("a", PROMPT, 50))
    rig.rounds(3)
    rig.worker.move_out()
    rig.rounds()
    rig.say(Cancel(key("a").request_id, 0))
    rig.assert_empty()
    if is_late:
        rig.outlet.answer(0)
        rig.rounds()
    assert rig.sink.ends()[key("a")].reason is EndReason.CANCELLED
    assert [one for report in rig.sink.reports for one in report.saved] == []


def test_one_whose_deadline_passes_on_its_way_ends_with_it() -> None:
    rig = MovingRig()
    rig.say(submit("a", PROMPT, 50, timeout_s=5.0))
    rig.worker.move_out()
    rig.rounds()
    rig.engine_rig.now += 6
    rig.rounds()
    assert rig.sink.ends()[key("a")].reason is EndReason.DEADLINE
    rig.assert_empty()


def test_a_request_in_the_inbox_keeps_a_worker_from_being_drained(rig: MovingRig) -> None:
    rig.worker.handle(G1, submit("a", PROMPT, 4))
    rig.worker.drain()
    found = rig.worker.call(lambda: rig.worker.is_drained)
    rig.rounds()
    assert not found.result(0)
    rig.rounds(10)
    rig.assert_empty()


def test_draining_is_told_to_all_gateways_and_to_those_that_connect_later(rig: MovingRig) -> None:
    other, late = RecordingSink(), RecordingSink()
    rig.worker.connect(G2, other)
    rig.rounds()
    rig.worker.drain()
    rig.worker.drain()
    rig.rounds()
    rig.worker.connect(GatewayId("late"), late)
    rig.rounds()
    for sink in (rig.sink, other, late):
        assert [one for one in sink.news if isinstance(one, Draining)] == [Draining()]
    assert rig.worker.welcome.is_draining


def test_flushing_forgets_what_no_request_uses_and_says_how_much(rig: MovingRig) -> None:
    rig.say(submit("a", PROMPT, 2))
    rig.rounds(5)
    rig.say(FlushCache(7), FlushCache(8))
    flushed = [one for one in rig.sink.news if isinstance(one, CacheFlushed)]
    assert flushed == [CacheFlushed(7, 1), CacheFlushed(8, 0)]
    assert rig.worker.stats.num_cached_blocks == 0


def test_what_gateways_know_of_prefixes_is_what_there_is_and_epochs_follow_each_other() -> None:
    rig, late = MovingRig(), RecordingSink()
    for index in range(6):
        rig.say(submit(f"r{index}", [index] * 40, 2))
        rig.rounds(4)
        if index == 3:
            rig.worker.connect(G2, late)
        if index == 4:
            rig.say(FlushCache(0))
    prefixes = rig.engine_rig.engine.requests.prefixes
    for sink in (rig.sink, late):
        news = [one for one in sink.news if isinstance(one, PrefixNews)]
        first = news[0].epoch
        assert [one.epoch for one in news] == list(range(first, first + len(news)))
        known: set[bytes] = set()
        for one in news:
            known = (known | set(one.added)) - set(one.removed)
        assert known == set(prefixes.keys())
        assert known
