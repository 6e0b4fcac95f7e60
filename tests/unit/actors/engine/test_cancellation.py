"""Requests that are cancelled in any phase: they end once and have given everything back."""

from __future__ import annotations

import msgspec
import pytest

from actors.engine.admission import SnapshotLimits
from configs.numerics import EndReason
from tests.fakes.engine_rig import (
    ALWAYS_COPY,
    NEVER_COPY,
    VOCAB,
    EngineRig,
    key,
    limits,
    submit,
)
from tests.fakes.fake_decoder import FakeRouter

KEPT = SnapshotLimits(max_bytes=10_000, interval_tokens=16, min_gain_tokens=1)
COSTS = pytest.mark.parametrize("costs", [ALWAYS_COPY, NEVER_COPY], ids=["copies", "recomputes"])


def ids(prompt_length: int, offset: int = 0) -> list[int]:
    return [(offset + position * 7) % VOCAB for position in range(prompt_length)]


PHASES = {
    "queued": (0, 4),
    "prefill": (1, 1),
    "between chunks": (2, 1),
    "decode": (12, 1),
    "leaving": (12, 1),
    "group leader": (1, 1),
    "group follower": (1, 1),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_request_can_be_cancelled_in_every_phase(phase: str) -> None:
    num_steps, num_others = PHASES[phase]
    rig = EngineRig(limits(max_step_tokens=32, snapshots=KEPT))
    for index in range(num_others if phase == "queued" else 0):
        rig.submit(submit(f"other{index}", [index], 50))
    rig.submit(submit("a", ids(70), 50, choices=3 if phase.startswith("group") else 1))
    for _ in range(num_steps):
        rig.step()
    name = key("a.1" if phase == "group follower" else "a")
    if phase == "leaving":
        rig.engine.begin_move(name)
    before = rig.engine.stats()
    rig.engine.cancel(name, rig.now)
    after = rig.engine.stats()
    assert not rig.engine.is_live(name)
    assert after.num_used_slots == before.num_used_slots - (phase != "queued")
    rig.engine.cancel(name, rig.now)
    rig.run_to_end()
    assert rig.end_of(name.request_id).reason is EndReason.CANCELLED
    rig.assert_memory_is_free()


@COSTS
def test_a_preempted_request_can_be_cancelled_and_leaves_no_copy(costs) -> None:
    rig = EngineRig(limits(num_state_slots=1, snapshots=KEPT), costs=costs)
    rig.submit(msgspec.structs.replace(submit("a", [1], 50), priority=9))
    for _ in range(3):
        rig.step()
    rig.submit(submit("urgent", [2], 50))
    rig.step()
    assert (rig.engine.stats().request_copy_bytes > 0) == (costs is ALWAYS_COPY)
    rig.engine.cancel(key("a"), rig.now)
    assert rig.engine.stats().request_copy_bytes == 0
    rig.run_to_end()
    rig.assert_memory_is_free()


def test_a_request_whose_experts_do_not_answer_fails_alone_and_can_be_cancelled_after() -> None:
    rig = EngineRig(limits(snapshots=KEPT), router=FakeRouter(choose=lambda _tickets: None))
    rig.submit(submit("waits", ids(20), 30))
    rig.submit(submit("queued", [1], 3, credit=0))
    rig.step()
    assert rig.end_of("waits").reason is EndReason.FAILED
    rig.engine.cancel(key("waits"), rig.now)
    rig.engine.cancel(key("queued"), rig.now)
    rig.step()
    assert rig.end_of("queued").reason is EndReason.CANCELLED
    rig.assert_memory_is_free()


def test_of_64_streams_those_cancelled_are_free_before_the_next_step() -> None:
    rig = EngineRig(limits(num_state_slots=64, num_blocks=256, snapshots=KEPT))
    for index in range(64):
        rig.submit(submit(f"r{index}", ids(20, index), 40))
    for step in range(10):
        rig.step()
        before = rig.engine.stats()
        chosen = rig.engine.live_keys()[: before.num_running][step::7]
        for name in chosen:
            rig.engine.cancel(name, rig.now)
        assert rig.engine.stats().num_free_slots == before.num_free_slots + len(chosen)
        rig.engine.requests.check()
    rig.run_to_end()
    assert len(rig.ended) == 64
    rig.assert_memory_is_free()
