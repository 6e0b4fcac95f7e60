"""Names and settings of what a launch starts."""

import json
from pathlib import Path

import pytest

from cluster.facts import gather_facts
from cluster.launch_plan import LOOPBACK, describe_config, plan_gateway, plan_launch
from configs.ids import ClusterId
from configs.loading import load_config
from configs.resolve import resolve
from model.checkpoint import Checkpoint

MINI = Path(__file__).parents[2] / "golden" / "mini"


def resolved_of(*settings):
    config = load_config(None, [f"checkpoint={MINI}", *settings])
    checkpoint = Checkpoint.open(config.checkpoint)
    return resolve(config, gather_facts(config, checkpoint)), checkpoint.dims


def plan_of(*settings, host=LOOPBACK):
    resolved, dims = resolved_of(*settings)
    return plan_launch(resolved, dims, cluster=ClusterId("c"), sockets=Path("/s"), host=host)


def test_workers_are_named_by_role_and_number():
    plan = plan_of("attention_pool.num_workers=3", "expert_pool.num_workers=2")
    assert plan.attention_workers == ("attention-0", "attention-1", "attention-2")
    assert plan.expert_workers == ("expert-0", "expert-1")


def test_every_expert_of_every_layer_has_a_holder():
    plan = plan_of("expert_pool.num_workers=5")
    assert plan.placement.layer_ids == tuple(range(1, 9))
    assert {w for p in plan.placement.layers for held in p.holders for w in held} == set(
        plan.expert_workers
    )


@pytest.mark.parametrize(
    ("transport", "listeners"),
    [("auto", ("shm", "tcp")), ("shm", ("shm",)), ("tcp", ("tcp",))],
)
def test_expert_workers_listen_on_what_the_router_may_use(transport, listeners):
    plan = plan_of(f"router.transport={transport}")
    assert plan.experts[0].transports == listeners
    assert plan.attention[0].router.transport == transport


@pytest.mark.parametrize(("host", "expected"), [(LOOPBACK, None), ("node", "node")])
def test_request_channel_is_a_socket_file_on_one_machine(host, expected):
    plan = plan_of(host=host)
    assert plan.attention[0].host == expected
    assert plan.experts[0].host == host


def test_settings_reach_the_workers():
    plan = plan_of(
        "numerics=invariant",
        "attention_pool.block_tokens=32",
        "attention_pool.num_blocks=7",
        "attention_pool.num_threads=3",
        "expert_pool.memory_bytes=123456789",
        "router.wire_dtype=bfloat16",
    )
    assert plan.attention[0].block_tokens == 32
    assert plan.attention[0].num_blocks == 7
    assert plan.attention[0].compute.num_threads == 3
    assert plan.attention[0].compute.numerics == "invariant"
    assert plan.attention[0].router.wire_dtype == "bfloat16"
    assert plan.attention[0].router.combine == "canonical"
    assert plan.experts[0].memory_bytes == 123456789
    assert plan.experts[0].compute.checkpoint.is_absolute()


def test_described_configuration_holds_no_password():
    resolved, _ = resolved_of("state.url=redis://user:hunter2@host:1/0")
    text = describe_config(resolved)
    assert "hunter2" not in text
    assert json.loads(text)["serving"]["state"]["url"] == "redis://host:1"


def test_described_configuration_says_what_auto_became():
    resolved, _ = resolved_of()
    tree = json.loads(describe_config(resolved))
    assert tree["resolved"]["num_blocks"] == resolved.num_blocks
    assert tree["notes"] == list(resolved.notes)


def test_gateway_is_told_the_model_and_its_workers():
    resolved, dims = resolved_of("api.model_name=mini")
    plan = plan_launch(resolved, dims, cluster=ClusterId("c"), sockets=Path("/s"), host=LOOPBACK)
    gateway = plan_gateway(
        plan,
        resolved,
        dims,
        version="1",
        state_url="unix:///x",
        tokenizer_folder=None,
        start_timeout_s=1.0,
    )
    assert gateway.settings.model_name == gateway.model.name == "mini"
    assert (
        gateway.settings.context_tokens == gateway.model.context_tokens == resolved.context_tokens
    )
    assert not gateway.model.has_tokenizer
    assert gateway.attention_workers == ("attention-0",)
