"""Twenty starts and stops on one data folder: nothing may pile up."""

import numpy as np
import pytest

from tests.fakes.served_cluster import MINI, ServedCluster, generate

NUM_CYCLES = 20


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_starts_and_stops_leave_nothing(tmp_path):
    golden = np.load(MINI / "golden.npz")
    for _ in range(NUM_CYCLES):
        cluster = ServedCluster(tmp_path, ["attention_pool.num_blocks=64"])
        try:
            record = cluster.wait_ready()
            tokens = generate(record.grpc, golden["tokens"].tolist(), max_tokens=4)
            assert tokens == golden["greedy"][:4].tolist()
            assert cluster.stop() == 0
            assert cluster.leftovers() == []
        finally:
            cluster.close()
    logs = list((tmp_path / "data" / "logs").glob("ray-session_*"))
    assert len(logs) <= 5
