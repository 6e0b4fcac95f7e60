"""A worker whose rounds a test runs, and transfers of snapshots that answer when told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actors.attention_worker import AttentionWorker, SnapshotTransfer
from actors.engine.admission import SnapshotLimits
from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import (
    SnapshotPlace,
)
from configs.errors import SnapshotError
from configs.ids import GatewayId, WorkerId
from tests.fakes.engine_rig import ALWAYS_COPY, EngineRig, limits
from tests.fakes.recording_sink import RecordingSink

G1, G2 = GatewayId("gateway-1"), GatewayId("gateway-2")
KEPT = SnapshotLimits(max_bytes=100_000, interval_tokens=16, min_gain_tokens=1)
PLACE = SnapshotPlace("unix:/somewhere", "a", 10, 100, WorkerId("attention-1"))
PROMPT = list(range(20))


class HeldOutlet:
    """Takes copies and answers when told."""

    def __init__(self) -> None:
        self.sent: list[tuple[RequestSnapshot, str, Callable[[Any], None]]] = []
        self.is_refusing = False

    def try_send(self, snapshot: RequestSnapshot, name: str, done: Callable[[Any], None]) -> bool:
        if self.is_refusing:
            return False
        self.sent.append((snapshot, name, done))
        return True

    def answer(self, index: int, error: SnapshotError | None = None) -> None:
        snapshot, name, done = self.sent[index]
        place = SnapshotPlace("folder:/x", name, snapshot.position, snapshot.num_bytes)
        done(place if error is None else error)


class HeldInlet:
    """Begins to fetch and answers when told."""

    def __init__(self) -> None:
        self.asked: list[Callable[[Any], None]] = []
        self.is_refusing = False

    def try_load(self, place: SnapshotPlace, done: Callable[[Any], None]) -> bool:
        if self.is_refusing:
            return False
        self.asked.append(done)
        return True


class MovingRig:
    """A worker whose rounds are run by the test, so that nothing depends on time."""

    def __init__(self, **changes: Any) -> None:
        self.engine_rig = EngineRig(limits(**{"snapshots": KEPT} | changes), costs=ALWAYS_COPY)
        self.outlet, self.inlet = HeldOutlet(), HeldInlet()
        self.worker = AttentionWorker(
            worker=WorkerId("attention-0"),
            engine=self.engine_rig.engine,
            clock=lambda: self.engine_rig.now,
            snapshots=SnapshotTransfer(outlet=self.outlet, inlet=self.inlet),
        )
        self.sink = RecordingSink()
        self.worker.connect(G1, self.sink)

    def rounds(self, num_rounds: int = 1) -> None:
        """As `run` does them, but never waits."""
        for _ in range(num_rounds):
            actions = list(self.worker._inbox)
            self.worker._inbox.clear()
            self.worker._run_actions(actions)
            self.worker._step()
            self.engine_rig.engine.requests.check()

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.worker.handle(G1, message)
        self.rounds()

    def assert_empty(self) -> None:
        self.engine_rig.assert_memory_is_free()
        assert self.worker.is_drained
