"""`smg` in front of our gRPC door and `openai` in front of it: nothing of it is ours."""

import asyncio
import logging

import openai
import pytest
import pytest_asyncio

from tests.fakes.gateway_house import wait_idle
from tests.fakes.smg_gateway import smg_in_front_of
from tests.fakes.text_house import CLOSE, text_gateway, text_pool
from tests.fakes.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text") / "checkpoint"


@pytest.fixture(scope="module")
def pool(folder):
    with text_pool(folder) as running:
        yield running


@pytest_asyncio.fixture
async def gateway(house, pool, folder):
    return await text_gateway(house, pool.endpoints, folder)


@pytest_asyncio.fixture
async def client(house, gateway, tmp_path):
    running = smg_in_front_of(gateway.bound.grpc, tmp_path)
    url = await asyncio.to_thread(running.__enter__)

    async def stop():
        await asyncio.to_thread(running.__exit__, None, None, None)

    house.close_later(stop)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)
    house.close_later(client.close)
    return client


async def model_of(client):
    return (await client.models.list()).data[0].id


async def test_plain_and_streamed_chats_and_clients_that_leave(client, gateway, pool, caplog):
    """One test, because smg takes seconds to start."""
    caplog.set_level(logging.INFO, logger="cluster.api.vllm_adapter")
    model = await model_of(client)
    wanted = {"model": model, "messages": ASK, "max_tokens": 20, "seed": 5}
    whole = await client.chat.completions.create(**wanted)
    assert whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"

    thought, usage = "", None
    stream = await client.chat.completions.create(
        **wanted, stream=True, stream_options={"include_usage": True}
    )
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            thought += getattr(choice.delta, "reasoning_content", None) or ""
    assert usage.completion_tokens == 20
    assert thought == whole.choices[0].message.reasoning_content

    closing = {str(CLOSE): 9}
    answered = await client.chat.completions.create(
        **{**wanted, "max_tokens": 200}, logit_bias=closing
    )
    assert answered.usage.completion_tokens > 0

    text = await client.completions.create(model=model, prompt="abc", max_tokens=7, temperature=0)
    assert text.usage.completion_tokens == 7

    endless = await client.chat.completions.create(
        **{**wanted, "max_tokens": 1500}, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(endless))
    stats = pool.attention[0].stats
    assert stats().running_requests == 1
    await endless.close()
    await until(lambda: pool.is_idle)
    await wait_idle(gateway)
    # Far from its length: it was aborted.
    assert stats().output_tokens < 1000
    assert "clients aborted 1 requests of 1 named" in caplog.text
