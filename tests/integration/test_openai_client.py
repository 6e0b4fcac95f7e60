"""The `openai` client, unchanged, against a gateway with real workers on random weights."""

import asyncio
import json

import openai
import pytest
import pytest_asyncio

from tests.fakes.gateway_house import wait_idle
from tests.fakes.text_house import CLOSE, openai_client, text_gateway, text_pool
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio

ASK = [{"role": "user", "content": "hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "s": {"type": "string", "maxLength": 5},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": PARAMETERS}}]
# Random weights close an element by chance only; this bias makes them do it soon.
CLOSING = {str(CLOSE): 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("text") / "checkpoint"


@pytest.fixture(scope="module")
def pool(folder):
    with text_pool(folder) as running:
        yield running


@pytest_asyncio.fixture
async def gateway(house, pool, folder):
    gateway = await text_gateway(house, pool.endpoints, folder)
    yield gateway
    await wait_idle(gateway)


@pytest_asyncio.fixture
async def client(house, gateway):
    return await openai_client(house, gateway)


def chat(client, **fields):
    values = {
        "model": "k3",
        "messages": ASK,
        "max_tokens": 24,
        "seed": 5,
        "reasoning_effort": "none",
    }
    return client.chat.completions.create(**{**values, **fields})


async def streamed(client, **fields):
    """Joined parts of a stream by choice: text, reasoning, calls, finish reason, and the usage."""
    parts, usage = {}, None
    stream = await chat(client, stream=True, stream_options={"include_usage": True}, **fields)
    async for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            one = parts.setdefault(choice.index, {"text": "", "reasoning": "", "calls": []})
            one["text"] += choice.delta.content or ""
            one["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            one["calls"] += [
                (call.function.name, call.function.arguments)
                for call in choice.delta.tool_calls or ()
            ]
            one["finish"] = choice.finish_reason
    return parts, usage


def whole(answer):
    return {
        choice.index: {
            "text": choice.message.content or "",
            "reasoning": getattr(choice.message, "reasoning_content", None) or "",
            "calls": [
                (call.function.name, call.function.arguments)
                for call in choice.message.tool_calls or ()
            ],
            "finish": choice.finish_reason,
        }
        for choice in answer.choices
    }


async def test_the_served_model_is_listed(client):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["k3"]
    assert (await client.models.retrieve("k3")).id == "k3"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="plain"),
        pytest.param({"n": 3}, id="three choices"),
        pytest.param({"reasoning_effort": "high", "logit_bias": CLOSING}, id="thinking"),
        pytest.param({"stop": ["e", "a", "0"], "max_tokens": 200}, id="stop texts"),
        pytest.param({"temperature": 0}, id="greedy"),
    ],
)
async def test_a_stream_joined_is_the_whole_answer(client, fields):
    parts, usage = await streamed(client, **fields)
    answer = await chat(client, **fields)
    assert parts == whole(answer)
    assert usage == answer.usage


async def test_stop_texts_are_no_part_of_the_answer(client):
    answer = await chat(client, stop=["e", "a", "0"], max_tokens=400)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert not set("ea0") & set(choice.message.content)


@pytest.mark.parametrize("thinking", ["none", "low"], ids=["instruct", "thinking"])
async def test_a_forced_tool_is_called_with_valid_arguments(client, thinking):
    forced = {"type": "function", "function": {"name": "get"}}
    answer = await chat(
        client,
        tools=TOOLS,
        tool_choice=forced,
        parallel_tool_calls=False,
        reasoning_effort=thinking,
        logit_bias=CLOSING,
        max_tokens=600,
    )
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get")
    assert set(arguments) == {"n", "s"}
    assert 0 <= arguments["n"] <= 9


async def test_a_conversation_with_calls_and_thinking_can_be_sent_back(client):
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "let me look",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "get", "arguments": '{"n": 1, "s": "x"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "42"},
    ]
    answer = await chat(client, messages=messages, tools=TOOLS)
    assert answer.usage.prompt_tokens > 200


async def test_a_response_format_is_obeyed(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    answer = await chat(client, response_format=wanted, max_tokens=200)
    assert set(json.loads(answer.choices[0].message.content)) == {"n", "s"}


async def test_structured_outputs_are_obeyed(client):
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = await chat(client, extra_body=extra)
    assert answer.choices[0].message.content in ("yes", "no")


async def test_logprobs_come_for_each_token(client):
    answer = await chat(client, logprobs=True, top_logprobs=2, max_tokens=5, temperature=0)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert entry.logprob > entry.top_logprobs[1].logprob


async def test_the_same_seed_gives_the_same_answer_and_another_one_another(client):
    answers = [await chat(client, seed=seed) for seed in (7, 7, 8)]
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] == texts[1] != texts[2]


async def test_completions_echo_prompts_with_their_logprobs(client):
    answer = await client.completions.create(
        model="k3", prompt=["ab", "cde"], max_tokens=4, seed=1, n=2, echo=True, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    for choice in answer.choices:
        values = choice.logprobs.token_logprobs
        assert values[0] is None
        assert None not in values[1:]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)


async def test_a_streamed_completion_is_the_whole_one(client):
    fields = {"model": "k3", "prompt": [1, 2, 3], "max_tokens": 20, "seed": 4, "n": 2}
    answer = await client.completions.create(**fields)
    texts = ["", ""]
    async for event in await client.completions.create(stream=True, **fields):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


async def test_a_client_that_goes_away_frees_the_workers(client, gateway, pool):
    stream = await chat(client, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    await anext(aiter(stream))
    await stream.close()
    await wait_idle(gateway)


async def test_a_client_that_does_not_wait_for_the_whole_answer_frees_the_workers(
    client, gateway, pool
):
    asking = asyncio.create_task(chat(client, max_tokens=1500, extra_body={"ignore_eos": True}))
    running = pool.attention[0].stats
    await until(lambda: running().running_requests > 0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await wait_idle(gateway)


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        pytest.param({"model": "other"}, openai.NotFoundError, None, id="model"),
        pytest.param({"temperature": -1}, openai.BadRequestError, "temperature", id="range"),
        pytest.param({"top_logprobs": 3}, openai.BadRequestError, None, id="contradiction"),
        pytest.param({"max_tokens": 10**6}, openai.BadRequestError, None, id="too long"),
        pytest.param({"tools": [1]}, openai.BadRequestError, "tools[0]", id="type"),
        pytest.param({"extra_body": {"foo": 1}}, openai.BadRequestError, "foo", id="unknown"),
        pytest.param({"stop": ["a"] * 10_000}, openai.BadRequestError, "stop", id="10,000 stops"),
        pytest.param({"messages": []}, openai.BadRequestError, "messages", id="empty"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            openai.BadRequestError,
            "messages[0].content[0].type",
            id="image",
        ),
        pytest.param(
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            openai.BadRequestError,
            None,
            id="schema",
        ),
        pytest.param(
            {"extra_headers": {"x-request-timeout-s": "-1"}},
            openai.BadRequestError,
            "x-request-timeout-s",
            id="timeout",
        ),
    ],
)
async def test_bad_input_is_an_error_of_its_own_class(client, fields, kind, param):
    with pytest.raises(kind) as caught:
        await chat(client, **fields)
    assert caught.value.body["param"] == param
    assert caught.value.body["message"]


async def test_a_deadline_is_an_error_of_its_own(client):
    with pytest.raises(openai.APIStatusError) as caught:
        await chat(
            client,
            max_tokens=1500,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-timeout-s": "0.2"},
        )
    assert (caught.value.status_code, caught.value.body["code"]) == (504, "REQUEST_DEADLINE")
