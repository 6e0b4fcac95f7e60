"""Requests that arrive with a snapshot, and what can happen while it is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import (
    Cancel,
    Credit,
    Submit,
)
from configs.errors import SnapshotError
from configs.numerics import EndReason
from tests.fakes.engine_rig import ALWAYS_COPY, VOCAB, EngineRig, key, limits, submit
from tests.fakes.fake_decoder import expected_tokens
from tests.fakes.moving_rig import G1, G2, KEPT, PLACE, PROMPT, MovingRig
from tests.fakes.recording_sink import RecordingSink


@pytest.fixture
def rig() -> Iterator[MovingRig]:
    made = MovingRig()
    yield made
    made.worker._grammars.close()


def snapshot_of(num_rounds: int = 4) -> tuple[RequestSnapshot, list[int]]:
    rig = EngineRig(limits(snapshots=KEPT), costs=ALWAYS_COPY)
    rig.submit(submit("a", PROMPT, 12))
    for _ in range(num_rounds):
        rig.step()
    snapshot = rig.engine.begin_move(key("a"))
    assert snapshot is not None
    return snapshot, rig.tokens[key("a")]


def arriving(generated: list[int], **changes: Any) -> Submit:
    message = submit("a", PROMPT, 12, attempt=1, generated=generated)
    return msgspec.structs.replace(message, **{"snapshot": PLACE} | changes)


def outcomes() -> dict[str, Any]:
    snapshot, _ = snapshot_of()
    return {
        "whole": snapshot,
        "lost": SnapshotError("gone"),
        "of other tokens": replace(snapshot, token_ids_T=snapshot.token_ids_T + 1),
        "of another model": replace(snapshot, model="other"),
    }


@pytest.mark.parametrize("kind", ["whole", "lost", "of other tokens", "of another model"])
def test_a_request_goes_on_whatever_became_of_its_snapshot(rig: MovingRig, kind: str) -> None:
    _, generated = snapshot_of()
    rig.say(arriving(generated))
    assert rig.engine_rig.engine.num_live == 0
    rig.inlet.asked[0](outcomes()[kind])
    rig.rounds(20)
    tokens = rig.sink.tokens(key("a", 1))
    assert generated + tokens == expected_tokens(PROMPT, 12, VOCAB)
    stats = rig.worker.stats
    restored = int(kind == "whole")
    assert (stats.restores_total, stats.refused_snapshots_total) == (restored, 1 - restored)


def test_an_inlet_that_refuses_computes_everything(rig: MovingRig) -> None:
    _, generated = snapshot_of()
    rig.inlet.is_refusing = True
    rig.say(arriving(generated))
    rig.rounds(20)
    assert generated + rig.sink.tokens(key("a", 1)) == expected_tokens(PROMPT, 12, VOCAB)


def test_credit_that_comes_during_the_fetch_counts(rig: MovingRig) -> None:
    snapshot, generated = snapshot_of()
    rig.say(arriving(generated, credit_tokens=1), Credit(key("a").request_id, 1, 100))
    rig.inlet.asked[0](snapshot)
    rig.rounds(20)
    assert rig.sink.ends()[key("a", 1)].reason is EndReason.FINISHED


@pytest.mark.parametrize("is_late", [False, True])
def test_one_that_is_cancelled_during_the_fetch_ends_once(rig: MovingRig, is_late: bool) -> None:
    snapshot, generated = snapshot_of()
    rig.say(arriving(generated), Cancel(key("a").request_id, 1))
    assert rig.sink.ends()[key("a", 1)].reason is EndReason.CANCELLED
    if is_late:
        rig.inlet.asked[0](snapshot)
        rig.rounds(2)
        assert rig.engine_rig.engine.num_live == 0
    rig.engine_rig.assert_memory_is_free()


def test_one_whose_deadline_passes_during_the_fetch_ends_then(rig: MovingRig) -> None:
    _, generated = snapshot_of()
    rig.say(arriving(generated, timeout_s=5.0))
    rig.engine_rig.now += 5.0
    rig.rounds()
    assert rig.sink.ends()[key("a", 1)].reason is EndReason.DEADLINE
    assert rig.engine_rig.engine.num_live == 0


def test_a_gateway_that_leaves_during_the_fetch_takes_its_request_along(rig: MovingRig) -> None:
    snapshot, generated = snapshot_of()
    rig.say(arriving(generated))
    rig.worker.disconnect(G1)
    rig.rounds()
    rig.worker.connect(G2, RecordingSink())
    rig.inlet.asked[0](snapshot)
    rig.rounds(3)
    assert rig.engine_rig.engine.num_live == 0
    rig.worker.drain()
    rig.rounds()
    rig.assert_empty()


def test_an_answer_to_an_earlier_fetch_is_not_taken_for_a_later_one(rig: MovingRig) -> None:
    snapshot, generated = snapshot_of()
    rig.say(arriving(generated))
    rig.worker.disconnect(G1)
    sink = RecordingSink()
    rig.worker.connect(G1, sink)
    rig.say(arriving(generated))
    rig.inlet.asked[0](SnapshotError("of the earlier one"))
    rig.rounds()
    assert rig.engine_rig.engine.num_live == 0
    rig.inlet.asked[1](snapshot)
    rig.rounds(20)
    assert sink.ends()[key("a", 1)].reason is EndReason.FINISHED
    assert rig.worker.stats.restores_total == 1


def test_one_that_arrives_twice_is_run_once(rig: MovingRig) -> None:
    snapshot, generated = snapshot_of()
    rig.say(arriving(generated), arriving(generated))
    assert len(rig.inlet.asked) == 1
    rig.inlet.asked[0](snapshot)
    rig.rounds(20)
    assert len(rig.sink.ends()) == 1


def test_a_worker_that_moves_out_during_the_fetch_sends_the_request_on(rig: MovingRig) -> None:
    snapshot, generated = snapshot_of()
    rig.say(arriving(generated))
    rig.worker.move_out()
    rig.rounds()
    rig.inlet.asked[0](snapshot)
    rig.rounds()
    assert rig.sink.ends()[key("a", 1)].reason is EndReason.MOVED
    rig.assert_empty()


def test_a_worker_that_stops_during_the_fetch_ends_the_request(rig: MovingRig) -> None:
    _, generated = snapshot_of()
    rig.worker.handle(G1, arriving(generated))
    rig.rounds()
    rig.worker.stop()
    rig.worker.run()
    assert rig.sink.ends()[key("a", 1)].reason is EndReason.FAILED
