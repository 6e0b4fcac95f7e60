"""The name of a model and of how it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.errors import CheckpointError
from configs.numerics import FloatType, Numerics
from model.fingerprint import fingerprint

HOW: dict[str, Any] = {
    "dtype": FloatType.FLOAT32,
    "numerics": Numerics.INVARIANT,
    "mla_norm_eps": 1e-6,
    "num_threads": 1,
}
BIG = 1 << 18


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "one.safetensors").write_bytes(bytes(100))
    (tmp_path / "two.safetensors").write_bytes(bytes(BIG))
    return tmp_path


def test_it_is_the_same_for_a_copy_in_another_folder(folder: Path) -> None:
    before = fingerprint(folder, **HOW)
    assert fingerprint(folder.rename(folder.with_name("moved")), **HOW) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": FloatType.BFLOAT16},
        {"numerics": Numerics.FAST},
        {"mla_norm_eps": 1e-5},
        {"num_threads": 2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_it_differs_by_how_the_model_computes(folder: Path, changes) -> None:
    assert fingerprint(folder, **HOW | changes) != fingerprint(folder, **HOW)


@pytest.mark.parametrize("position", [0, 99], ids=["first byte", "last byte"])
def test_a_byte_of_a_small_file_matters(folder: Path, position: int) -> None:
    before = fingerprint(folder, **HOW)
    data = bytearray(100)
    data[position] = 1
    (folder / "one.safetensors").write_bytes(data)
    assert fingerprint(folder, **HOW) != before


@pytest.mark.parametrize("position", [0, BIG - 1], ids=["first byte", "last byte"])
def test_the_ends_of_a_large_file_matter(folder: Path, position: int) -> None:
    before = fingerprint(folder, **HOW)
    data = bytearray(BIG)
    data[position] = 1
    (folder / "two.safetensors").write_bytes(data)
    assert fingerprint(folder, **HOW) != before


@pytest.mark.parametrize(
    ("name", "data"),
    [("config.json", b'{"a": 2}'), ("two.safetensors", bytes(BIG + 1)), ("x.safetensors", b"")],
    ids=["config", "length", "one file more"],
)
def test_config_lengths_and_files_matter(folder: Path, name: str, data: bytes) -> None:
    before = fingerprint(folder, **HOW)
    (folder / name).write_bytes(data)
    assert fingerprint(folder, **HOW) != before


def test_other_files_do_not_matter(folder: Path) -> None:
    before = fingerprint(folder, **HOW)
    (folder / "README.md").write_text("hello")
    assert fingerprint(folder, **HOW) == before


def test_a_folder_without_a_config_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        fingerprint(tmp_path, **HOW)
