from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.loading import load_config, parse_override, setting_names
from configs.numerics import Combine, FloatType, Numerics


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return path


def test_file_and_overrides_are_merged_and_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, "checkpoint: /a\nexpert_pool: {num_workers: 3}\nnumerics: invariant\n")
    config = load_config(path, ["expert_pool.num_workers=5", "router.wire_dtype=bfloat16"])
    assert config.expert_pool.num_workers == 5
    assert config.router.wire_dtype is FloatType.BFLOAT16
    assert config.numerics is Numerics.INVARIANT


def test_defaults_need_only_a_checkpoint() -> None:
    config = load_config(None, ["checkpoint=/a"])
    assert config.checkpoint == Path("/a")
    assert config.router.combine == "auto"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=4", ("a.b", 4)),
        ("a=true", ("a", True)),
        ("a=1e-5", ("a", 1e-5)),
        ("a=x=y", ("a", "x=y")),
        ("a=", ("a", None)),
    ],
)
def test_override_values_are_yaml(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("expert_pool.num_worker=2", ["expert_pool.num_worker", "expert_pool.num_workers"]),
        ("expert_pool.num_workers=0", ["expert_pool.num_workers", "0", "1"]),
        ("expert_pool.num_workers=many", ["expert_pool.num_workers", "many"]),
        ("router.transport=pigeon", ["router.transport", "pigeon", "shm"]),
        ("router.combine=sum", ["router.combine", "sum", "presum"]),
        ("numerics=exact", ["numerics", "exact", "invariant"]),
        ("attention_pool.block_tokens=17", ["attention_pool.block_tokens", "17", "16"]),
        ("api.grpc_port=70000", ["api.grpc_port", "70000", "65535"]),
        ("state.url=ftp://x", ["state.url", "ftp://x"]),
        ("nonsense", ["nonsense", "key=value"]),
        ("checkpoint.x=1", ["checkpoint"]),
    ],
)
def test_wrong_setting_is_named_with_its_value_and_what_is_allowed(
    override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["checkpoint=/a", override])
    for word in words:
        assert word in caught.value.message


def test_missing_checkpoint_is_named() -> None:
    with pytest.raises(ConfigError, match="checkpoint: must be set"):
        load_config(None)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "\x80"], ids=["syntax", "list", "bytes"])
def test_unusable_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        load_config(path)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent.yaml")


def test_documented_settings_exist_under_their_names() -> None:
    documented = {
        "checkpoint", "model.compute_dtype", "numerics", "attention_pool.num_workers",
        "expert_pool.num_workers", "router.transport", "router.wire_dtype", "router.combine",
        "api.grpc_port", "api.http_port", "state.url", "data_dir", "ray.address",
    }  # fmt: skip
    assert documented <= set(setting_names())


def test_combine_accepts_its_two_names() -> None:
    config = load_config(None, ["checkpoint=/a", "router.combine=presum"])
    assert config.router.combine is Combine.PRESUM
