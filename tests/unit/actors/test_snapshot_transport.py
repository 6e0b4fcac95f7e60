"""Where copies of requests may come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.request_channel import SnapshotPlace
from actors.snapshot_transport import SnapshotPeer, SnapshotTransport
from actors.worker_settings import AttentionServiceSettings, ComputeSettings, SnapshotSettings
from configs.ids import WorkerId
from configs.numerics import FloatType, Numerics
from router.settings import RouterSettings


@pytest.fixture
def transport(tmp_path: Path):
    compute = ComputeSettings(tmp_path, 1e-6, FloatType.FLOAT32, Numerics.FAST, "cpu", 1)
    settings = AttentionServiceSettings(
        worker=WorkerId("attention-0"),
        compute=compute,
        router=RouterSettings(latent_size=8),
        context_tokens=64,
        num_blocks=4,
        block_tokens=16,
        num_state_slots=1,
        max_step_tokens=16,
        max_queued_requests=1,
        host=None,
        sockets=tmp_path,
        snapshots=SnapshotSettings(folder=tmp_path / "shared"),
    )
    made = SnapshotTransport(settings)
    made.set_peers([SnapshotPeer(WorkerId("attention-1"), f"unix:{tmp_path}/peer.sock")])
    yield made
    made.close()


@pytest.mark.parametrize(
    ("address", "is_tried"),
    [
        ("unix:{}/attention-0-vault.sock", True),
        ("unix:{}/peer.sock", True),
        ("folder:{}/shared", True),
        ("folder:{}/elsewhere", False),
        ("folder:/etc", False),
        ("tcp:127.0.0.1:1", False),
    ],
)
def test_copies_come_from_places_of_the_cluster_only(
    transport: SnapshotTransport, tmp_path: Path, address: str, is_tried: bool
) -> None:
    place = SnapshotPlace(address.format(tmp_path), "r", 1, 10)
    ends: list[object] = []
    assert transport.try_load(place, ends.append) is is_tried
    transport.close()
    assert len(ends) == is_tried
