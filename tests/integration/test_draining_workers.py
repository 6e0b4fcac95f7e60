"""A gateway in front of two real workers, one of which drains: all its requests go on elsewhere."""

import asyncio

import pytest

from actors.snapshot_transport import SnapshotPeer
from cluster.api.gateway import Gateway, GatewaySettings
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from configs.ids import GatewayId
from configs.numerics import Numerics
from tests.fakes.gateway_house import FixedTopology, answer_of, ask, wait_idle
from tests.fakes.pool_in_process import pool_in_process
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio

NUM_TOKENS = 40


@pytest.fixture
def pool(golden_dir):
    """Two workers whose answers are equal to the bit, and that know each other's vaults."""
    with pool_in_process(
        golden_dir / "mini", num_attention=2, num_blocks=128, numerics=Numerics.INVARIANT
    ) as running:
        yield running


@pytest.fixture
def gateway_of(house, pool):
    async def start():
        settings = GatewaySettings(
            gateway=GatewayId("g0"),
            host="127.0.0.1",
            grpc_port=0,
            http_port=0,
            model_name="k3",
            max_message_bytes=1 << 20,
            max_running_requests=16,
            drain_timeout_s=5.0,
            vocab_size=pool.dims.vocab_size,
            context_tokens=512,
            eos_token_ids=pool.dims.eos_token_ids,
            tokenizer_folder=None,
        )
        gateway = await Gateway.start(settings, pool.endpoints, FixedTopology())
        house.close_later(gateway.stop)
        return gateway

    return start


def sampled(number):
    sampling = pb.SamplingParams(temperature=1.0, seed=number)
    prompt = [(7 * number + position) % 50 for position in range(20 + number)]
    return ask(*prompt, max_tokens=NUM_TOKENS, ignore_eos=True, sampling=sampling)


@pytest.mark.parametrize("has_vaults", [True, False], ids=["snapshots", "recompute"])
async def test_running_requests_go_on_at_the_other_worker_with_equal_tokens(
    house, pool, gateway_of, has_vaults
):
    leaving = pool.attention[0]
    if has_vaults:
        peers = [
            SnapshotPeer(endpoint.worker, worker.vault_address)
            for endpoint, worker in zip(pool.endpoints, pool.attention, strict=True)
        ]
        for worker in pool.attention:
            worker.set_peers(peers)
    gateway = await gateway_of()
    stub = await house.stub(gateway)
    alone = [(await answer_of(stub.Generate(sampled(number))))[0] for number in range(4)]
    calls = [aiter(stub.Generate(sampled(number))) for number in range(4)]
    begun = [list((await anext(call)).chunk.token_ids) for call in calls]
    leaving.move_out()
    rest = await asyncio.gather(*(answer_of(call) for call in calls))
    for number, (token_ids, finished) in enumerate(rest):
        assert begun[number] + token_ids == alone[number]
        assert finished.usage.output_tokens == NUM_TOKENS
    assert gateway.metrics.value("latentmesh_requests_moved_total", reason="drain") > 0
    await wait_idle(gateway)
    await until(lambda: leaving.is_drained and pool.is_idle)
