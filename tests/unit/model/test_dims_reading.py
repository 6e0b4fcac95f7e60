"""Reading config.json: what the released file means, and that nothing is guessed."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from configs.errors import CheckpointError, ModelConfigError
from model.dims import LayerKind
from model.dims_reading import load_config, load_dims, read_dims

GOLDEN = Path(__file__).parents[2] / "golden"
MISSING = object()


@pytest.fixture
def config():
    return load_config(GOLDEN / "mini-mxfp4")


def changed(config, key, value):
    """A copy with one dotted key replaced or removed."""
    result = copy.deepcopy(config)
    section = result
    *parents, last = key.split(".")
    for parent in parents:
        section = section[parent]
    if value is MISSING:
        del section[last]
    else:
        section[last] = value
    return result


def test_released_config_gives_k3() -> None:
    dims = load_dims(GOLDEN / "config_k3.json")
    assert (dims.num_layers, dims.hidden_size, dims.vocab_size) == (93, 7168, 163840)
    assert (dims.kda.num_heads, dims.kda.head_dim, dims.kda.gate_lower_bound) == (96, 128, -5.0)
    assert (dims.mla.q_lora_rank, dims.mla.cache_width, dims.mla.norm_eps) == (1536, 576, 1e-6)
    assert (dims.moe.num_experts, dims.moe.num_experts_per_token) == (896, 16)
    assert (dims.moe.latent_size, dims.moe.shared_hidden_size) == (3584, 6144)
    assert (dims.situ_beta, dims.situ_linear_beta, dims.attn_res_block_size) == (4.0, 25.0, 12)
    assert dims.eos_token_ids == (163586,)


def test_one_based_layer_lists_become_zero_based() -> None:
    dims = load_dims(GOLDEN / "config_k3.json")
    assert dims.mla_layers == (*range(3, 92, 4), 92)
    assert dims.layer_kinds[89:] == (LayerKind.KDA,) * 2 + (LayerKind.MLA,) * 2
    assert dims.moe_layers == tuple(range(1, 93))


def test_folder_and_file_give_the_same_dims() -> None:
    assert load_dims(GOLDEN / "mini") == load_dims(GOLDEN / "mini" / "config.json")


def test_mla_norm_eps_is_a_setting(config) -> None:
    assert read_dims(config, mla_norm_eps=1e-5).mla.norm_eps == 1e-5


def test_several_stop_tokens_are_kept(config) -> None:
    assert read_dims(changed(config, "eos_token_id", [1, 7])).eos_token_ids == (1, 7)


def test_stop_token_of_the_text_config_is_used_when_the_outer_has_none(config) -> None:
    inner = changed(changed(config, "eos_token_id", MISSING), "text_config.eos_token_id", 9)
    assert read_dims(inner).eos_token_ids == (9,)


def test_null_q_lora_rank_means_no_bottleneck(config) -> None:
    assert read_dims(changed(config, "text_config.q_lora_rank", None)).mla.q_lora_rank is None


def test_null_linear_beta_leaves_the_up_branch(config) -> None:
    key = "text_config.activation_situ_linear_beta"
    assert read_dims(changed(config, key, None)).situ_linear_beta is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_config.topk_method", "noaux_tc"),
        ("text_config.num_nextn_predict_layers", 0),
        ("text_config.rope_scaling", None),
        ("text_config.tie_word_embeddings", False),
    ],
)
def test_optional_keys_may_hold_the_implemented_value(config, key: str, value: object) -> None:
    assert read_dims(changed(config, key, value)) == read_dims(config)


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "text_config",
        "text_config.model_type",
        "text_config.hidden_act",
        "text_config.activation_situ_beta",
        "text_config.activation_situ_linear_beta",
        "text_config.attn_res_block_size",
        "text_config.linear_attn_config",
        "text_config.linear_attn_config.gate_lower_bound",
        "text_config.linear_attn_config.kda_layers",
        "text_config.linear_attn_config.full_attn_layers",
        "text_config.linear_attn_config.use_full_rank_gate",
        "text_config.mla_use_nope",
        "text_config.mla_use_output_gate",
        "text_config.moe_router_activation_func",
        "text_config.moe_renormalize",
        "text_config.routed_scaling_factor",
        "text_config.routed_expert_hidden_size",
        "text_config.latent_moe_use_norm",
        "text_config.num_expert_group",
        "text_config.topk_group",
        "text_config.moe_layer_freq",
        "text_config.num_shared_experts",
        "text_config.q_lora_rank",
        "text_config.rms_norm_eps",
        "text_config.tie_word_embeddings",
        "text_config.quantization_config.format",
    ],
)
def test_missing_key_is_named(config, key: str) -> None:
    with pytest.raises(ModelConfigError, match=rf"lacks {key.replace('.', '[.]')},"):
        read_dims(changed(config, key, MISSING))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("text_config", []),
        ("text_config.model_type", "deepseek_v3"),
        ("text_config.hidden_act", "silu"),
        ("text_config.moe_router_activation_func", "softmax"),
        ("text_config.topk_method", "greedy"),
        ("text_config.num_expert_group", 8),
        ("text_config.topk_group", 4),
        ("text_config.mla_use_nope", False),
        ("text_config.mla_use_nope", 1),
        ("text_config.mla_use_output_gate", False),
        ("text_config.linear_attn_config.use_full_rank_gate", False),
        ("text_config.linear_attn_config.gate_lower_bound", 5.0),
        ("text_config.linear_attn_config.short_conv_kernel_size", 1),
        ("text_config.moe_layer_freq", 2),
        ("text_config.tie_word_embeddings", True),
        ("tie_word_embeddings", True),
        ("text_config.num_nextn_predict_layers", 1),
        ("text_config.rope_scaling", {"type": "yarn"}),
        ("text_config.num_key_value_heads", 1),
        ("text_config.num_experts_per_token", 13),
        ("text_config.attn_res_block_size", 0),
        ("text_config.attn_res_block_size", None),
        ("text_config.activation_situ_beta", None),
        ("text_config.activation_situ_beta", 0),
        ("text_config.hidden_size", "64"),
        ("text_config.hidden_size", True),
        ("text_config.rms_norm_eps", float("inf")),
        ("text_config.first_k_dense_replace", 10),
        ("text_config.latent_moe_use_norm", "yes"),
        ("text_config.dtype", "float16"),
        ("text_config.quantization_config.quant_method", "gptq"),
        ("text_config.quantization_config.format", "nvfp4-pack-quantized"),
        ("text_config.quantization_config.kv_cache_scheme", {"num_bits": 8}),
        ("text_config.quantization_config.config_groups", {}),
        ("text_config.quantization_config.config_groups.group_0.weights.num_bits", 8),
        ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16),
        ("text_config.quantization_config.config_groups.group_0.input_activations", {"bits": 8}),
        ("text_config.moe_intermediate_size", 48),
        ("eos_token_id", 320),
        ("eos_token_id", []),
        ("eos_token_id", [1, -1]),
    ],
    ids=str,
)
def test_value_that_is_not_implemented_is_named(config, key: str, value: object) -> None:
    with pytest.raises(ModelConfigError) as caught:
        read_dims(changed(config, key, value))
    assert f"{key} is {value!r}" in caught.value.message


@pytest.mark.parametrize(
    ("kda", "full", "message"),
    [
        ([1, 2, 3, 5, 6, 7], [4, 8], "1 of 9 layers, first 9"),
        ([0, 1, 2, 3, 5, 6, 7], [4, 8, 9], r"kda_layers is 0; expected 1-based"),
        ([1, 2, 3, 5, 6, 7], [4, 8, 9, 10], r"full_attn_layers is 10; expected 1-based"),
        ([1, 2, 3, 4, 5, 6, 7], [4, 8, 9], "layer 4 is named twice"),
        ([1, 2, 3, 5, 6, 7, 7], [4, 8, 9], "layer 7 is named twice"),
        ([1, 2, 3, 5, 6, "7"], [4, 8, 9], "a list of integers"),
    ],
    ids=["gap", "zero-based", "beyond", "overlap", "repeated", "not-integers"],
)
def test_layer_lists_must_tile_the_layers(config, kda, full, message: str) -> None:
    broken = changed(config, "text_config.linear_attn_config.kda_layers", kda)
    broken = changed(broken, "text_config.linear_attn_config.full_attn_layers", full)
    with pytest.raises(ModelConfigError, match=message):
        read_dims(broken)


def test_absent_folder_is_reported(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_dims(tmp_path / "nowhere")


def test_empty_folder_is_reported(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_dims(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[]", "holds a list"), ("\x80", "not valid JSON")],
    ids=["cut", "array", "binary"],
)
def test_damaged_config_is_reported(tmp_path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message):
        load_dims(tmp_path)


def test_config_without_text_config_is_not_guessed(tmp_path, config) -> None:
    flat = json.dumps(config["text_config"])
    (tmp_path / "config.json").write_text(flat, encoding="utf-8")
    with pytest.raises(ModelConfigError, match="model_type is 'kimi_linear'"):
        load_dims(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**9), ("num_hidden_layers", 10**15), ("num_experts", 10**6)],
)
def test_absurd_count_is_refused_at_once(golden_dir, key, value):
    config = load_config(golden_dir / "mini")
    config["text_config"][key] = value
    with pytest.raises(ModelConfigError, match=str(value)):
        read_dims(config)
