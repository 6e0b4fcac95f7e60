"""Priority reaches the worker from every door that has it, and is checked at each."""

import asyncio

import openai
import pytest
import pytest_asyncio

from cluster.api.gateway_settings import AttentionEndpoint
from cluster.cli import main
from configs import errors
from model.tokenizer_files import write_tokenizer_files
from tests.fakes.gateway_house import answer_of, ask, error_of
from tests.fakes.text_house import openai_client, text_gateway

pytestmark = pytest.mark.asyncio


class Doors:
    def __init__(self, worker, gateway, stub, client):
        self.worker = worker
        self.gateway = gateway
        self.stub = stub
        self.client = client

    def ask_openai(self, door, **fields):
        if door == "chat":
            return self.client.chat.completions.create(
                model="k3", messages=[{"role": "user", "content": "Hi"}], max_tokens=1, **fields
            )
        return self.client.completions.create(model="k3", prompt="Hi", max_tokens=1, **fields)


@pytest_asyncio.fixture
async def doors(house, tmp_path):
    """A gateway with text in front of a fake worker, and clients of its doors."""
    write_tokenizer_files(tmp_path)
    worker = await house.worker(vocab_size=512, first_token=97, max_request_tokens=4000)
    gateway = await text_gateway(house, [AttentionEndpoint(worker.name, worker.address)], tmp_path)
    client = await openai_client(house, gateway)
    return Doors(worker, gateway, await house.stub(gateway), client)


@pytest.mark.parametrize("priority", [-100, 0, 7, 100])
async def test_grpc_hands_priority_to_the_worker(doors, priority):
    await answer_of(doors.stub.Generate(ask(max_tokens=1, priority=priority)))
    assert (await doors.worker.submitted.get()).priority == priority


@pytest.mark.parametrize("priority", [-101, 101, -(1 << 31)])
async def test_grpc_refuses_what_is_outside_the_range(doors, priority):
    error, status = await error_of(doors.stub.Generate(ask(max_tokens=1, priority=priority)))
    assert (type(error), status.name) == (errors.InvalidRequestError, "INVALID_ARGUMENT")
    assert f"priority is {priority}; allowed: -100 to 100" in error.message
    assert doors.worker.submitted.empty()


@pytest.mark.parametrize("door", ["chat", "completions"])
@pytest.mark.parametrize("priority", [-100, 100])
async def test_openai_hands_priority_to_the_worker(doors, door, priority):
    await doors.ask_openai(door, extra_body={"priority": priority})
    assert (await doors.worker.submitted.get()).priority == priority


@pytest.mark.parametrize("door", ["chat", "completions"])
@pytest.mark.parametrize("priority", [-101, 101, 1.5, "high"])
async def test_openai_refuses_what_is_no_priority(doors, door, priority):
    with pytest.raises(openai.BadRequestError, match="priority"):
        await doors.ask_openai(door, extra_body={"priority": priority})
    assert doors.worker.submitted.empty()


@pytest.mark.parametrize("door", ["chat", "completions"])
async def test_priority_is_0_unless_asked_for(doors, door):
    await doors.ask_openai(door)
    assert (await doors.worker.submitted.get()).priority == 0


async def test_command_line_hands_priority_to_the_worker(doors, capsys):
    address = doors.gateway.bound.grpc
    words = ["generate", "Hi", "--server", address, "--max-tokens", "1", "--priority", "-3"]

    def act():
        with pytest.raises(SystemExit) as ended:
            main(words)
        return ended.value.code or 0

    assert await asyncio.to_thread(act) == 0, capsys.readouterr().err
    assert (await doors.worker.submitted.get()).priority == -3
