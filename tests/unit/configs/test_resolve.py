from __future__ import annotations

from dataclasses import replace

import pytest

from configs.errors import ConfigError, DeviceTooSmallError
from configs.loading import load_config
from configs.numerics import Combine
from configs.resolve import Facts, resolve, return_bytes_ratio
from configs.schema import ServingConfig

FACTS = Facts(
    num_cores=8,
    available_memory_bytes=10_000_000,
    has_cuda=False,
    attention_side_bytes=100_000,
    expert_bytes=100,
    num_experts=16,
    num_moe_layers=4,
    num_experts_per_token=4,
    bytes_per_block=1_000,
    bytes_per_slot=500,
    model_context_tokens=4_096,
)


def config(*overrides: str) -> ServingConfig:
    return load_config(None, ["checkpoint=/a", "attention_pool.num_state_slots=4", *overrides])


def test_every_auto_becomes_a_value_with_a_reason() -> None:
    resolved = resolve(config(), FACTS)
    assert resolved.device == "cpu"
    assert resolved.attention_threads == resolved.expert_threads == 2
    assert resolved.context_tokens == 4_096
    assert len(resolved.notes) == 8


def test_blocks_are_no_more_than_all_slots_at_full_context_can_use() -> None:
    resolved = resolve(config(), replace(FACTS, available_memory_bytes=10**12))
    assert resolved.num_blocks == 4 * 64


def test_blocks_are_cut_to_memory_and_context_to_blocks() -> None:
    resolved = resolve(config("attention_pool.memory_bytes=115000"), FACTS)
    assert resolved.num_blocks == 10
    assert resolved.context_tokens == 640


def test_invariant_numerics_fix_the_number_of_threads() -> None:
    resolved = resolve(config("numerics=invariant"), FACTS)
    assert (resolved.attention_threads, resolved.expert_threads) == (1, 1)


def test_invariant_numerics_take_canonical_sums() -> None:
    resolved = resolve(config("numerics=invariant", "expert_pool.num_workers=4"), FACTS)
    assert resolved.combine is Combine.CANONICAL


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["numerics=invariant", "router.combine=presum"], ["presum", "canonical"]),
        (["model.device=cuda"], ["model.device", "cpu"]),
        (["router.transport=nccl"], ["router.transport", "nccl", "tcp"]),
        (["attention_pool.context_tokens=5000"], ["5000", "4096"]),
        (
            ["attention_pool.num_blocks=2", "attention_pool.context_tokens=1000"],
            ["1000", "128", "num_blocks"],
        ),
        (["attention_pool.num_threads=0"], ["attention_pool.num_threads", "0"]),
        (["attention_pool.num_blocks=0"], ["attention_pool.num_blocks", "0"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(*overrides), FACTS)
    for word in words:
        assert word in caught.value.message


def test_attention_side_that_does_not_fit_is_refused_with_the_bytes() -> None:
    with pytest.raises(DeviceTooSmallError, match=r"106,000 bytes.*90,000"):
        resolve(config("attention_pool.memory_bytes=90000"), FACTS)


def test_experts_that_do_not_fit_are_refused_with_the_bytes() -> None:
    with pytest.raises(DeviceTooSmallError, match=r"3,200 bytes.*3,000"):
        resolve(config("expert_pool.memory_bytes=3000"), FACTS)


@pytest.mark.parametrize(
    ("num_workers", "extra"), [(64, 0.11), (16, 0.55), (8, 1.26), (4, 3.04)], ids=str
)
def test_return_bytes_ratio_of_k3_matches_the_design(num_workers: int, extra: float) -> None:
    ratio = return_bytes_ratio(num_experts=896, num_picks=16, num_workers=num_workers)
    assert ratio - 1 == pytest.approx(extra, abs=0.01)
