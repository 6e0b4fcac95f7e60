"""The golden tokens through whole clusters of several sizes, on both transports.

Four of the eight run everywhere, each size and each transport among them; the rest are long.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cluster.api.client import LatentmeshClient
from cluster.api.params import ScoreParams
from tests.fakes.served_cluster import MINI, ServedCluster, generate

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

MXFP4 = MINI.parent / "mini-mxfp4"
NUM_GREEDY = 64


def case(num_attention, num_expert, transport, checkpoint, tolerance, *, is_long=False):
    return pytest.param(
        num_attention,
        num_expert,
        transport,
        checkpoint,
        tolerance,
        id=f"{num_attention}x{num_expert}-{transport}-{checkpoint.name}",
        marks=[pytest.mark.long] if is_long else [],
    )


CASES = [
    case(1, 1, "shm", MINI, 1e-3),
    case(1, 2, "tcp", MXFP4, 5e-3),
    case(2, 3, "shm", MXFP4, 5e-3),
    case(3, 1, "tcp", MINI, 1e-3),
    case(1, 1, "tcp", MXFP4, 5e-3, is_long=True),
    case(1, 2, "shm", MINI, 1e-3, is_long=True),
    case(2, 3, "tcp", MINI, 1e-3, is_long=True),
    case(3, 1, "shm", MXFP4, 5e-3, is_long=True),
]


@pytest.mark.parametrize(
    ("num_attention", "num_expert", "transport", "checkpoint", "tolerance"), CASES
)
def test_every_worker_gives_the_golden_tokens_and_logits(
    num_attention, num_expert, transport, checkpoint, tolerance, tmp_path
):
    golden = np.load(checkpoint / "golden.npz")
    prompt = golden["tokens"].tolist()
    settings = [
        f"attention_pool.num_workers={num_attention}",
        f"expert_pool.num_workers={num_expert}",
        f"router.transport={transport}",
        "attention_pool.num_blocks=64",
        "attention_pool.num_state_slots=8",
    ]
    cluster = ServedCluster(tmp_path, settings, checkpoint=checkpoint)
    try:
        record = cluster.wait_ready()
        num_requests = 2 * num_attention
        with ThreadPoolExecutor(num_requests) as pool:
            answers = list(
                pool.map(
                    lambda _: generate(record.grpc, prompt, max_tokens=NUM_GREEDY),
                    range(num_requests),
                )
            )
        with LatentmeshClient(record.grpc) as client:
            logits = client.score(ScoreParams(prompt=prompt), timeout_s=120)
            view = client.topology()
        assert answers == [golden["greedy"].tolist()] * num_requests
        assert np.abs(logits - golden["logits"]).max() < tolerance
        assert all(worker.output_tokens > 0 for worker in view.attention_workers)
        assert all(worker.pairs > 0 for worker in view.expert_workers)
        assert [worker.transports for worker in view.attention_workers] == [
            (transport,) * num_expert
        ] * num_attention
        assert cluster.stop() == 0
        assert cluster.leftovers() == []
    finally:
        cluster.close()
