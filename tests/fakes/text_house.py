"""A gateway with text, in front of real workers on the smallest checkpoint or of a fake worker."""

from contextlib import contextmanager

import openai

from cluster.api.gateway import Gateway, GatewaySettings
from configs.ids import GatewayId
from model.tokenizer_files import BYTE_VOCAB_SIZE, END_OF_MESSAGE, special_id
from tests.fakes.gateway_house import FixedTopology
from tests.fakes.pool_in_process import pool_in_process
from tests.fakes.text_checkpoint import write_text_checkpoint

END = special_id(END_OF_MESSAGE)
CLOSE = special_id("<|close|>")
CONTEXT_TOKENS = 2048


@contextmanager
def text_pool(folder, *, num_slots=8, **changes):
    """Workers on a checkpoint that is written to `folder`."""
    write_text_checkpoint(folder, context_tokens=CONTEXT_TOKENS)
    running = pool_in_process(
        folder, num_blocks=1024, context_tokens=CONTEXT_TOKENS, num_slots=num_slots, **changes
    )
    with running as pool:
        yield pool


def text_settings(folder, **changes):
    values = {
        "gateway": GatewayId("g0"),
        "host": "127.0.0.1",
        "grpc_port": 0,
        "http_port": 0,
        "model_name": "k3",
        "max_message_bytes": 1 << 20,
        "max_running_requests": 128,
        "drain_timeout_s": 5.0,
        "vocab_size": BYTE_VOCAB_SIZE,
        "context_tokens": CONTEXT_TOKENS,
        "eos_token_ids": (END,),
        "tokenizer_folder": folder,
    }
    return GatewaySettings(**{**values, **changes})


async def text_gateway(house, endpoints, folder, **changes):
    """A gateway that knows the byte-level vocabulary of `folder`."""
    gateway = await Gateway.start(text_settings(folder, **changes), endpoints, FixedTopology())
    house.close_later(gateway.stop)
    return gateway


async def openai_client(house, gateway, **changes):
    values = {"api_key": "unused", "max_retries": 0, "timeout": 60.0}
    client = openai.AsyncOpenAI(base_url=f"http://{gateway.bound.http}/v1", **{**values, **changes})
    house.close_later(client.close)
    return client
