"""The gateway in front of real workers that serve a checkpoint with known logits."""

import asyncio

import numpy as np
import pytest

from cluster.api.gateway import Gateway, GatewaySettings
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from configs import errors
from configs.ids import GatewayId
from tests.fakes.gateway_house import FixedTopology, answer_of, ask, error_of, wait_idle
from tests.fakes.pool_in_process import pool_in_process

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def pool(golden_dir):
    with pool_in_process(golden_dir / "mini", num_attention=1, num_experts=2) as running:
        yield running


@pytest.fixture(scope="module")
def golden(golden_dir):
    with np.load(golden_dir / "mini" / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def gateway_of(house, pool):
    async def start(**kwargs):
        values = {
            "gateway": GatewayId("g0"),
            "host": "127.0.0.1",
            "grpc_port": 0,
            "http_port": 0,
            "model_name": "k3",
            "max_message_bytes": 64 << 20,
            "max_running_requests": 16,
            "drain_timeout_s": 5.0,
            "vocab_size": pool.dims.vocab_size,
            "context_tokens": 512,
            "eos_token_ids": pool.dims.eos_token_ids,
            "tokenizer_folder": None,
        }
        settings = GatewaySettings(**{**values, **kwargs})
        gateway = await Gateway.start(settings, pool.endpoints, FixedTopology())
        house.close_later(gateway.stop)
        return gateway

    return start


async def until_idle(pool):
    """Wait until the workers hold nothing; a step is what it takes."""
    async with asyncio.timeout(20):
        while not pool.is_idle:  # noqa: ASYNC110 - threads of the workers, which tell nobody
            await asyncio.sleep(0.005)


async def test_greedy_tokens_are_those_of_the_independent_implementation(house, gateway_of, golden):
    stub = await house.stub(await gateway_of())
    prompt = golden["tokens"].tolist()
    greedy = golden["greedy"].tolist()
    token_ids, finished = await answer_of(
        stub.Generate(ask(*prompt, max_tokens=len(greedy), ignore_eos=True))
    )
    assert token_ids == greedy
    assert finished.usage.prompt_tokens == len(prompt)
    assert finished.usage.output_tokens == len(greedy)


async def test_scored_logits_are_those_of_the_independent_implementation(house, gateway_of, golden):
    stub = await house.stub(await gateway_of())
    request = pb.ScoreRequest(token_ids=pb.TokenIds(ids=golden["tokens"].tolist()))
    data = b"".join([response.logits async for response in stub.Score(request)])
    logits = np.frombuffer(data, dtype="<f4").reshape(golden["logits"].shape)
    assert np.abs(logits - golden["logits"]).max() < 1e-3


async def test_seeded_answers_are_equal_across_gateways(house, gateway_of):
    request = ask(5, 6, 7, max_tokens=12, ignore_eos=True)
    request.sampling.temperature = 1.0
    request.sampling.seed = 42
    answers = []
    for name in ("g1", "g2"):
        stub = await house.stub(await gateway_of(gateway=GatewayId(name)))
        answers.append((await answer_of(stub.Generate(request)))[0])
    assert answers[0] == answers[1]


async def test_answer_longer_than_the_credit_is_not_held_up(house, gateway_of):
    stub = await house.stub(await gateway_of())
    _, finished = await answer_of(stub.Generate(ask(max_tokens=270, ignore_eos=True)))
    assert finished.usage.output_tokens == 270


@pytest.mark.parametrize("num_chunks", [0, 3], ids=["at once", "while decoding"])
async def test_cancelled_request_frees_the_memory_of_its_worker(
    house, gateway_of, pool, num_chunks
):
    gateway = await gateway_of()
    stub = await house.stub(gateway)
    call = stub.Generate(ask(*[3] * 100, max_tokens=400, ignore_eos=True))
    for _ in range(num_chunks):
        await call.read()
    call.cancel()
    await wait_idle(gateway)
    await until_idle(pool)


async def test_deadline_frees_the_memory_of_its_worker(house, gateway_of, pool):
    gateway = await gateway_of()
    stub = await house.stub(gateway)
    error, _ = await error_of(
        stub.Generate(ask(*[3] * 100, max_tokens=400, ignore_eos=True), timeout=0.15)
    )
    assert isinstance(error, errors.DeadlineError)
    await wait_idle(gateway)
    await until_idle(pool)


async def test_gateway_that_stops_frees_the_memory_of_its_requests(house, gateway_of, pool):
    gateway = await gateway_of()
    stub = await house.stub(gateway)
    call = stub.Generate(ask(*[3] * 100, max_tokens=400, ignore_eos=True))
    await call.read()
    await gateway.stop()
    await until_idle(pool)


async def test_request_that_fits_the_context_but_no_worker_is_too_large(house, gateway_of):
    stub = await house.stub(await gateway_of(context_tokens=4096))
    error, _ = await error_of(stub.Generate(ask(max_tokens=2000)))
    assert isinstance(error, errors.RequestTooLargeError)


async def test_sampled_answer_is_reproduced_from_its_reported_seed(house, gateway_of):
    stub = await house.stub(await gateway_of())
    sampling = pb.SamplingParams(temperature=1.0, top_p=0.9, top_k=1000)
    first, finished = await answer_of(
        stub.Generate(ask(max_tokens=12, ignore_eos=True, sampling=sampling))
    )
    sampling.seed = finished.seed
    again, _ = await answer_of(
        stub.Generate(ask(max_tokens=12, ignore_eos=True, sampling=sampling))
    )
    assert again == first
