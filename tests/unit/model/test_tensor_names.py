"""The expected tensors of K3 against the facts of the released index."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.dims_reading import load_dims
from model.tensor_names import (
    attention_side_tensors,
    canonical_name,
    expert_tensors,
    is_vision,
)

GOLDEN = Path(__file__).parents[2] / "golden"
NUM_VISION_TENSORS = 2 + 27 * 6 + 1 + 3


@pytest.fixture(scope="module")
def dims():
    return load_dims(GOLDEN / "config_k3.json")


def test_number_of_tensors_is_that_of_the_release(dims) -> None:
    experts = len(dims.moe_layers) * dims.moe.num_experts
    per_expert = len(expert_tensors(dims, 1, 0, packed=True))
    total = len(attention_side_tensors(dims)) + experts * per_expert + NUM_VISION_TENSORS
    assert total == 497_220


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lm_head.weight", (163840, 7168)),
        ("model.output_attn_res_proj.weight", (1, 7168)),
        ("model.layers.0.mlp.down_proj.weight", (7168, 33792)),
        ("model.layers.0.self_attn.q_conv1d.weight", (12288, 1, 4)),
        ("model.layers.0.self_attn.f_b_proj.weight", (12288, 128)),
        ("model.layers.92.self_attn.q_b_proj.weight", (18432, 1536)),
        ("model.layers.92.self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
        ("model.layers.92.self_attn.kv_b_proj.weight", (24576, 512)),
        ("model.layers.92.self_attn.g_proj.weight", (12288, 7168)),
        ("model.layers.1.block_sparse_moe.gate.weight", (896, 7168)),
        ("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168)),
        ("model.layers.1.block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168)),
    ],
)
def test_attention_side_shapes(dims, name: str, shape: tuple[int, ...]) -> None:
    assert attention_side_tensors(dims)[name].shape == shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("w1.weight_packed", (3072, 1792)),
        ("w1.weight_scale", (3072, 112)),
        ("w2.weight_packed", (3584, 1536)),
        ("w2.weight_scale", (3584, 96)),
        ("w3.weight_packed", (3072, 1792)),
    ],
)
def test_packed_expert_shapes(dims, name: str, shape: tuple[int, ...]) -> None:
    tensors = expert_tensors(dims, 92, 895, packed=True)
    assert tensors[f"model.layers.92.block_sparse_moe.experts.895.{name}"].shape == shape


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.3.mlp_res.proj_weight", "model.layers.3.mlp_res_proj.weight"),
        (
            "language_model.model.output_attn_res.norm_weight",
            "model.output_attn_res_norm.weight",
        ),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_become_canonical(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vision_tower.patch_embed.proj.weight", True),
        ("mm_projector.proj.0.weight", True),
        ("language_model.lm_head.weight", False),
    ],
)
def test_vision_tensors_are_told_by_their_prefix(name: str, expected: bool) -> None:
    assert is_vision(name) is expected
