"""Makes `ModelDims` from a checkpoint's `config.json`.

Values are taken where the released file really has them: the text model in `text_config`, KDA in
`linear_attn_config` inside it. A missing value, or one whose function is not implemented here, is a
`ModelConfigError` naming the key: no default is ever silent, because a model with the wrong
activation or without attention residuals still writes fluent text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from configs.errors import CheckpointError, ModelConfigError
from model.config_section import ConfigSection
from model.dims import KdaDims, LayerKind, MlaDims, ModelDims, MoeDims
from model.storage import read_storage

MAX_EXPERTS = 1 << 16
"""Routed experts of a layer; K3 has 896. Beyond it a config is a typing error."""
MLA_NORM_EPS = 1e-6
"""The released modelling code constructs q_a_layernorm and kv_a_layernorm with this default, not
with `rms_norm_eps`; some engines use 1e-5 (logits move by about 1e-4)."""

CONFIG_FILE = "config.json"


def load_config(path: Path) -> dict[str, object]:
    """Parse `config.json`.

    Args:
        path: A checkpoint folder or a config file.

    Raises:
        CheckpointError: There is no such file, or it is not a JSON object.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError as exc:
        if not path.exists():
            raise CheckpointError(f"checkpoint {path} does not exist") from exc
        raise CheckpointError(
            f"checkpoint {path} has no {CONFIG_FILE}; expected a folder with {CONFIG_FILE} and "
            "safetensors files in the released layout"
        ) from exc
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{file} is not valid JSON: {exc}; copy it again") from exc
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds a {type(config).__name__}, expected a JSON object")
    return config


def load_dims(path: Path, *, mla_norm_eps: float = MLA_NORM_EPS) -> ModelDims:
    """Read the shape of the model of a checkpoint folder or config file.

    Raises:
        CheckpointError: As `load_config`.
        ModelConfigError: As `read_dims`.
    """
    return read_dims(load_config(path), mla_norm_eps=mla_norm_eps)


def read_dims(config: Mapping[str, object], *, mla_norm_eps: float = MLA_NORM_EPS) -> ModelDims:
    """Turn a parsed `config.json` into `ModelDims`.

    Args:
        config: The outer object, as parsed.
        mla_norm_eps: Epsilon of q_a_layernorm and kv_a_layernorm, which no config states.

    Raises:
        ModelConfigError: A value that changes the function is missing or not implemented.
    """
    outer = ConfigSection(config)
    outer.require("model_type", "kimi_k3")
    text = outer.section("text_config")
    linear = text.section("linear_attn_config")
    _check_function(outer, text, linear)
    read_storage(config)
    layer_kinds = _read_layer_kinds(text, linear)
    num_dense_layers = text.integer("first_k_dense_replace", at_least=0)
    if num_dense_layers > len(layer_kinds):
        raise text.unusable(
            "first_k_dense_replace", num_dense_layers, f"at most {len(layer_kinds)} layers"
        )
    vocab_size = text.integer("vocab_size")
    return ModelDims(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size"),
        dense_hidden_size=text.integer("intermediate_size"),
        num_dense_layers=num_dense_layers,
        context_tokens=text.integer("max_position_embeddings"),
        rms_norm_eps=text.positive("rms_norm_eps"),
        attn_res_block_size=text.integer("attn_res_block_size"),
        situ_beta=text.positive("activation_situ_beta"),
        situ_linear_beta=_read_linear_beta(text),
        layer_kinds=layer_kinds,
        kda=_read_kda(linear),
        mla=_read_mla(text, mla_norm_eps),
        moe=_read_moe(text),
        eos_token_ids=_read_eos(outer if outer.has("eos_token_id") else text, vocab_size),
    )


def _check_function(outer: ConfigSection, text: ConfigSection, linear: ConfigSection) -> None:
    """Refuse every switch whose other position is not implemented."""
    text.require("model_type", "kimi_linear")
    text.require("hidden_act", "situ")
    text.require("mla_use_nope", True)  # noqa: FBT003 - the expected value
    text.require("mla_use_output_gate", True)  # noqa: FBT003 - the expected value
    text.require("moe_router_activation_func", "sigmoid")
    text.require("num_expert_group", 1)
    text.require("topk_group", 1)
    text.require("moe_layer_freq", 1)
    text.require_if_present("topk_method", "noaux_tc")
    text.require_if_present("num_nextn_predict_layers", 0)
    linear.require("use_full_rank_gate", True)  # noqa: FBT003 - the expected value
    if text.has("rope_scaling"):
        raise text.unusable(
            "rope_scaling", text.value("rope_scaling"), "no such key: no layer has positions"
        )
    tied = [section for section in (text, outer) if section.has("tie_word_embeddings")]
    for section in tied if tied else [text]:
        section.require("tie_word_embeddings", False)  # noqa: FBT003 - the expected value


def _read_linear_beta(text: ConfigSection) -> float | None:
    """An explicit null leaves the up branch untouched; a missing key is an error."""
    if text.value("activation_situ_linear_beta") is None:
        return None
    return text.positive("activation_situ_linear_beta")


def _read_layer_kinds(text: ConfigSection, linear: ConfigSection) -> tuple[LayerKind, ...]:
    """Both lists are 1-based and together name every layer exactly once."""
    num_layers = text.integer("num_hidden_layers")
    kinds: dict[int, LayerKind] = {}
    for key, kind in (("kda_layers", LayerKind.KDA), ("full_attn_layers", LayerKind.MLA)):
        for number in linear.integers(key):
            if not 1 <= number <= num_layers:
                raise linear.unusable(key, number, f"1-based layer numbers in 1..{num_layers}")
            if number in kinds:
                raise ModelConfigError(
                    f"config.json: layer {number} is named twice in {linear.name('kda_layers')} "
                    f"and {linear.name('full_attn_layers')}; expected each of 1..{num_layers} once"
                )
            kinds[number] = kind
    if len(kinds) < num_layers:
        # Among the first len + 1 numbers one is missing; the rest may be absurdly many.
        first = next(number for number in range(1, len(kinds) + 2) if number not in kinds)
        raise ModelConfigError(
            f"config.json: {num_layers - len(kinds)} of {num_layers} layers, first {first}, are in "
            f"neither {linear.name('kda_layers')} nor {linear.name('full_attn_layers')}; "
            f"expected each of 1..{num_layers} once (1-based)"
        )
    return tuple(kinds[number] for number in range(1, num_layers + 1))


def _read_kda(linear: ConfigSection) -> KdaDims:
    gate_lower_bound = linear.number("gate_lower_bound")
    if gate_lower_bound >= 0:
        raise linear.unusable("gate_lower_bound", gate_lower_bound, "a number < 0")
    return KdaDims(
        num_heads=linear.integer("num_heads"),
        head_dim=linear.integer("head_dim"),
        conv_kernel_size=linear.integer("short_conv_kernel_size", at_least=2),
        gate_lower_bound=gate_lower_bound,
    )


def _read_mla(text: ConfigSection, norm_eps: float) -> MlaDims:
    num_heads = text.integer("num_attention_heads")
    text.require("num_key_value_heads", num_heads)
    has_bottleneck = text.value("q_lora_rank") is not None
    return MlaDims(
        num_heads=num_heads,
        q_lora_rank=text.integer("q_lora_rank") if has_bottleneck else None,
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_nope_head_dim=text.integer("qk_nope_head_dim"),
        qk_rope_head_dim=text.integer("qk_rope_head_dim", at_least=0),
        v_head_dim=text.integer("v_head_dim"),
        norm_eps=norm_eps,
    )


def _read_moe(text: ConfigSection) -> MoeDims:
    num_experts = text.integer("num_experts", at_most=MAX_EXPERTS)
    num_experts_per_token = text.integer("num_experts_per_token")
    if num_experts_per_token > num_experts:
        raise text.unusable(
            "num_experts_per_token", num_experts_per_token, f"at most num_experts, {num_experts}"
        )
    return MoeDims(
        num_experts=num_experts,
        num_experts_per_token=num_experts_per_token,
        num_shared_experts=text.integer("num_shared_experts", at_least=0),
        expert_hidden_size=text.integer("moe_intermediate_size"),
        latent_size=text.integer("routed_expert_hidden_size"),
        has_latent_norm=text.flag("latent_moe_use_norm"),
        renormalize=text.flag("moe_renormalize"),
        routed_scaling_factor=text.positive("routed_scaling_factor"),
    )


def _read_eos(holder: ConfigSection, vocab_size: int) -> tuple[int, ...]:
    """The stop tokens; a single id or a list."""
    found = holder.value("eos_token_id")
    if isinstance(found, list):
        ids = holder.integers("eos_token_id")
    else:
        ids = (holder.integer("eos_token_id", at_least=0),)
    if not ids or any(not 0 <= token < vocab_size for token in ids):
        raise holder.unusable("eos_token_id", found, f"token ids in 0..{vocab_size - 1}")
    return ids
