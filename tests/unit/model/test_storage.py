"""Where quantization_config and dtype stand in a config."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ModelConfigError
from configs.numerics import FloatType
from model.dims_reading import load_config
from model.storage import StorageFormat, read_storage

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("config_k3.json", StorageFormat(FloatType.BFLOAT16, has_packed_experts=True)),
        ("mini-mxfp4", StorageFormat(FloatType.BFLOAT16, has_packed_experts=True)),
        ("mini", StorageFormat(FloatType.FLOAT32, has_packed_experts=False)),
    ],
)
def test_known_configs(name: str, expected: StorageFormat) -> None:
    assert read_storage(load_config(GOLDEN / name)) == expected


def test_quantization_copied_to_the_outer_object_is_found() -> None:
    config = load_config(GOLDEN / "mini-mxfp4")
    config["quantization_config"] = config["text_config"].pop("quantization_config")
    assert read_storage(config).has_packed_experts


def test_unusable_quantization_in_the_outer_object_is_named() -> None:
    config = load_config(GOLDEN / "mini")
    config["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ModelConfigError, match=r"json: quantization_config\.quant_method is 'fp8'"):
        read_storage(config)


def test_older_name_of_dtype_is_read() -> None:
    config = load_config(GOLDEN / "mini")
    del config["dtype"]
    config["torch_dtype"] = "torch.float32"
    assert read_storage(config).dtype is FloatType.FLOAT32
