"""How a checkpoint stores its tensors, as far as `config.json` says.

What a file really holds decides when weights are loaded (`model/checkpoint.py`); this is what sizes
are computed from when there is only a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.numerics import FloatType
from model.config_section import ConfigSection

MXFP4_GROUP = 32
"""Consecutive inputs that share one scale."""


@dataclass(frozen=True, slots=True)
class StorageFormat:
    """Data types of the stored tensors."""

    dtype: FloatType
    """Everything that is neither packed nor always float32."""
    has_packed_experts: bool
    """Routed experts are MXFP4: half a byte per value and one scale byte per `MXFP4_GROUP`."""


def read_storage(config: Mapping[str, object]) -> StorageFormat:
    """Read `dtype` and `quantization_config` of a parsed `config.json`.

    The released file holds `quantization_config` inside `text_config`; re-saved ones copy it to the
    outer object too.

    Raises:
        ModelConfigError: A quantization that is not MXFP4 as released, or an unknown dtype.
    """
    outer = ConfigSection(config)
    text = outer.section("text_config")
    holder = text if text.has("quantization_config") else outer
    has_packed_experts = holder.has("quantization_config")
    if has_packed_experts:
        _check_quantization(holder.section("quantization_config"))
        for key in ("moe_intermediate_size", "routed_expert_hidden_size"):
            if text.integer(key) % MXFP4_GROUP:
                raise text.unusable(
                    key, text.value(key), f"a multiple of the MXFP4 group, {MXFP4_GROUP}"
                )
    return StorageFormat(dtype=_read_dtype(outer, text), has_packed_experts=has_packed_experts)


def _check_quantization(quantization: ConfigSection) -> None:
    quantization.require("quant_method", "compressed-tensors")
    quantization.require("format", "mxfp4-pack-quantized")
    quantization.require_if_present("quantization_status", "compressed")
    if quantization.has("kv_cache_scheme"):
        found = quantization.value("kv_cache_scheme")
        raise quantization.unusable("kv_cache_scheme", found, "null: a quantized cache is not read")
    groups = quantization.section("config_groups")
    if not groups.values:
        raise quantization.unusable("config_groups", {}, "one group of weights")
    for key in groups.values:
        group = groups.section(key)
        group.require_if_present("format", "mxfp4-pack-quantized")
        for activations in ("input_activations", "output_activations"):
            if group.has(activations):
                raise group.unusable(activations, group.value(activations), "null")
        weights = group.section("weights")
        weights.require("num_bits", 4)
        weights.require("type", "float")
        weights.require("strategy", "group")
        weights.require("group_size", MXFP4_GROUP)
        weights.require_if_present("symmetric", True)  # noqa: FBT003 - the expected value
        weights.require_if_present("scale_dtype", "torch.uint8")


def _read_dtype(outer: ConfigSection, text: ConfigSection) -> FloatType:
    """`dtype` of the text model, bfloat16 (as released) where neither object names one."""
    for section in (text, outer):
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                found = section.value(key)
                try:
                    return FloatType(str(found).removeprefix("torch."))
                except ValueError as exc:
                    expected = " or ".join(member.value for member in FloatType)
                    raise section.unusable(key, found, expected) from exc
    return FloatType.BFLOAT16
