"""Sizes of K3 against the published counts, and of small models against their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.numerics import FloatType
from model.checkpoint import Checkpoint
from model.dims_reading import load_config, read_dims
from model.sizing import compute_sizes
from model.storage import StorageFormat, read_storage

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def k3():
    config = load_config(GOLDEN / "config_k3.json")
    return compute_sizes(read_dims(config), read_storage(config))


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("num_parameters", 2_779_484_478_208),
        ("num_active_parameters", 104_189_614_848),
        ("routed_expert_bytes", 1_446_456_066_048),
        ("attention_side_bytes", 113_509_540_864),
        ("bytes_per_expert", 17_547_264),
        ("kv_bytes_per_token", 27_648),
        ("kda_state_bytes_per_request", 434_110_464),
        ("conv_state_bytes_per_request", 15_261_696),
        ("boundary_bytes_per_token", 7_168),
    ],
)
def test_released_model(k3, field: str, expected: int) -> None:
    assert getattr(k3, field) == expected


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("routed experts", 2_722_740_830_208),
        ("KDA attention", 30_618_088_704),
        ("shared experts", 12_155_092_992),
        ("MLA attention", 5_572_706_304),
        ("latent projections", 4_726_980_608 + 329_728),
        ("embedding", 1_174_405_120),
        ("lm_head", 1_174_405_120),
        ("dense MLP", 726_663_168),
        ("router", 590_872_576 + 82_432),
        ("norms and AttnRes vectors", 3_999_744 + 21_504),
    ],
)
def test_released_components(k3, name: str, parameters: int) -> None:
    assert {part.name: part.num_parameters for part in k3.components}[name] == parameters


def test_components_come_largest_first(k3) -> None:
    counts = [part.num_parameters for part in k3.components]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == k3.num_parameters


@pytest.mark.parametrize("name", ["mini", "mini-mxfp4"])
def test_bytes_equal_those_of_the_files(name: str) -> None:
    checkpoint = Checkpoint.open(GOLDEN / name)
    sizes = checkpoint.sizes()
    stored = sum(tensor.num_bytes for tensor in checkpoint.stored.values())
    assert sizes.routed_expert_bytes + sizes.attention_side_bytes == stored


def test_packing_changes_bytes_but_not_parameters() -> None:
    dims = Checkpoint.open(GOLDEN / "mini").dims
    dense = compute_sizes(dims, StorageFormat(FloatType.BFLOAT16, has_packed_experts=False))
    packed = compute_sizes(dims, StorageFormat(FloatType.BFLOAT16, has_packed_experts=True))
    assert dense.num_parameters == packed.num_parameters
    assert dense.bytes_per_expert == 3 * 32 * 32 * 2
    assert packed.bytes_per_expert == 3 * 32 * (16 + 1)


def test_model_without_moe_layers_has_no_experts() -> None:
    dims = Checkpoint.open(GOLDEN / "mini").dims
    sizes = compute_sizes(
        replace(dims, num_dense_layers=dims.num_layers),
        StorageFormat(FloatType.FLOAT32, has_packed_experts=False),
    )
    assert sizes.routed_expert_bytes == 0
    embedding = dims.vocab_size * dims.hidden_size
    assert sizes.num_active_parameters == sizes.num_parameters - embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mini", "mini-mxfp4"])
def test_loaded_expert_bytes_are_foretold(name: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(GOLDEN / name)
    expert = checkpoint.load_expert(1, 0, dtype=dtype, device=torch.device("cpu"))
    assert expert.num_bytes == checkpoint.expert_bytes(dtype)
