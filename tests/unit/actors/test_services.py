"""Both services in one process, joined as a launch joins them."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from actors.attention_service import AttentionService
from actors.expert_service import ExpertService
from actors.request_channel import Sampling, Submit
from actors.request_client import RequestClient
from actors.worker_settings import AttentionServiceSettings, ComputeSettings, ExpertServiceSettings
from configs.errors import CheckpointError, DeviceTooSmallError, WorkerError
from configs.ids import Generation, RequestId, WorkerId
from configs.numerics import FloatType, Numerics
from router.membership import Membership
from router.placement import plan_initial_placement
from router.settings import RouterSettings
from tests.fakes.step_reports import step_reports

MINI = Path(__file__).parents[2] / "golden" / "mini"
WORKER = WorkerId("attention-0")
EXPERTS = (WorkerId("expert-0"), WorkerId("expert-1"))
PLACEMENT = plan_initial_placement(moe_layers=range(1, 9), num_experts=12, workers=EXPERTS)


def compute(checkpoint=MINI):
    return ComputeSettings(
        checkpoint=checkpoint,
        mla_norm_eps=1e-6,
        dtype=FloatType.FLOAT32,
        numerics=Numerics.FAST,
        device="cpu",
        num_threads=1,
    )


def attention_settings(sockets, checkpoint=MINI):
    return AttentionServiceSettings(
        worker=WORKER,
        compute=compute(checkpoint),
        router=RouterSettings(latent_size=32),
        context_tokens=512,
        num_blocks=16,
        block_tokens=32,
        num_state_slots=4,
        max_step_tokens=64,
        max_queued_requests=4,
        host=None,
        sockets=sockets,
    )


def expert_settings(worker, sockets, **changes):
    values = {
        "worker": worker,
        "compute": compute(),
        "memory_bytes": None,
        "merge_window_s": 0.0,
        "spin_s": 0.0,
        "transports": ("shm", "tcp"),
        "host": "127.0.0.1",
        "sockets": sockets,
    }
    return ExpertServiceSettings(**{**values, **changes})


@pytest.fixture
def pools(tmp_path_factory):
    """A loaded attention worker and the membership of two loaded expert workers."""
    sockets = tmp_path_factory.mktemp("s")
    experts = [ExpertService(expert_settings(worker, sockets)) for worker in EXPERTS]
    attention = AttentionService(attention_settings(sockets))
    infos = tuple(expert.load(PLACEMENT) for expert in experts)
    attention.load()
    yield attention, experts, Membership(Generation(1), infos), sockets
    for service in (attention, *experts):
        service.stop()


async def ask(address, token_ids, max_tokens):
    client = await RequestClient.connect(address)
    try:
        await client.send(Submit(RequestId("r"), 1, list(token_ids), max_tokens, Sampling(), []))
        tokens = []
        async for report in step_reports(client):
            tokens += [token for news in report.tokens for token in news.token_ids]
            if report.ended:
                return tokens, report.ended[0]
    finally:
        await client.close()


def test_joined_services_give_the_golden_tokens(pools):
    attention, _, membership, _ = pools
    golden = np.load(MINI / "golden.npz")
    address = attention.connect(membership, PLACEMENT)
    tokens, _ = asyncio.run(ask(address, golden["tokens"].tolist(), 8))
    assert tokens == golden["greedy"][:8].tolist()


def test_counts_show_the_work(pools):
    attention, experts, membership, _ = pools
    address = attention.connect(membership, PLACEMENT)
    asyncio.run(ask(address, [1, 2, 3], 2))
    stats = attention.stats()
    assert (stats.prompt_tokens, stats.output_tokens) == (3, 2)
    assert stats.transports == ("shm", "shm")
    assert stats.latent_bytes_sent == stats.latents_sent * 32 * 4
    assert stats.wire_bytes_sent > stats.latent_bytes_sent
    assert (stats.used_blocks, stats.used_slots) == (0, 0)
    # 4 tokens were computed (the last one was only sampled), 3 picks in each of 8 layers.
    assert sum(expert.stats().pairs for expert in experts) == 4 * 3 * 8
    assert sum(expert.stats().num_expert_slots for expert in experts) == 12 * 8


def test_stopped_services_leave_no_socket(pools):
    attention, experts, membership, sockets = pools
    attention.connect(membership, PLACEMENT)
    assert list(sockets.iterdir()) != []
    for service in (attention, *experts):
        service.stop()
    assert list(sockets.iterdir()) == []


def test_address_is_known_once_requests_are_taken(pools):
    attention, _, membership, _ = pools
    with pytest.raises(WorkerError, match="takes no requests"):
        attention.wait_until_serving(0.0)
    address = attention.connect(membership, PLACEMENT)
    assert attention.wait_until_serving(0.0) == address


def test_connecting_again_keeps_the_address(pools):
    attention, _, membership, _ = pools
    address = attention.connect(membership, PLACEMENT)
    assert attention.connect(membership, PLACEMENT) == address


def test_connecting_before_loading_is_an_error(tmp_path):
    service = AttentionService(attention_settings(tmp_path))
    with pytest.raises(WorkerError, match="before it was loaded"):
        service.connect(Membership(Generation(1), ()), PLACEMENT)


def test_stats_and_stop_are_allowed_before_loading(tmp_path):
    attention = AttentionService(attention_settings(tmp_path))
    expert = ExpertService(expert_settings(EXPERTS[0], tmp_path))
    assert attention.stats().memory_bytes == 0
    assert expert.stats().weight_bytes == 0
    attention.stop()
    expert.stop()


def test_missing_checkpoint_is_an_error(tmp_path):
    service = AttentionService(attention_settings(tmp_path, checkpoint=tmp_path / "none"))
    with pytest.raises(CheckpointError):
        service.load()


def test_experts_beyond_the_budget_are_refused(tmp_path):
    service = ExpertService(expert_settings(EXPERTS[0], tmp_path, memory_bytes=1000))
    with pytest.raises(DeviceTooSmallError, match="expert_pool"):
        service.load(PLACEMENT)
