"""Headers of safetensors files: damage is found when a folder is opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from configs.errors import CheckpointError
from model.tensor_files import INDEX_FILE, open_tensor_files, read_header


def write(folder: Path, name: str, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / name)
    return folder / name


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def raw_file(folder: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def test_header_gives_type_shape_and_bytes(tmp_path) -> None:
    file = write(tmp_path, "model.safetensors", a=torch.zeros(2, 3, dtype=torch.bfloat16))
    stored = read_header(file)["a"]
    assert (stored.dtype, stored.shape, stored.num_bytes) == ("BF16", (2, 3), 12)


def test_tensors_are_read_as_stored(tmp_path) -> None:
    value = torch.arange(6, dtype=torch.uint8).view(2, 3)
    write(tmp_path, "model.safetensors", a=value)
    assert torch.equal(open_tensor_files(tmp_path).read("a"), value)


def test_single_file_may_have_any_name(tmp_path) -> None:
    write(tmp_path, "weights.safetensors", a=torch.zeros(1))
    assert list(open_tensor_files(tmp_path).tensors) == ["a"]


def test_shards_are_joined_by_the_index(tmp_path) -> None:
    write(tmp_path, "one.safetensors", a=torch.zeros(1))
    write(tmp_path, "two.safetensors", b=torch.ones(1))
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    files = open_tensor_files(tmp_path)
    assert files.read("b").item() == 1.0
    assert files.index_problems == ()


def test_index_that_disagrees_with_the_files_is_a_problem(tmp_path) -> None:
    write(tmp_path, "one.safetensors", a=torch.zeros(1))
    write(tmp_path, "two.safetensors", b=torch.zeros(1), a=torch.zeros(1))
    index = {"a": "one.safetensors", "c": "two.safetensors"}
    write_index(tmp_path, index)
    problems = sorted(open_tensor_files(tmp_path).index_problems)
    assert problems == [
        "a: in one.safetensors and again in two.safetensors",
        "b: in two.safetensors, but the index says nothing",
        "c: the index says two.safetensors, which does not hold it",
    ]


def test_absent_shard_is_named(tmp_path) -> None:
    write(tmp_path, "one.safetensors", a=torch.zeros(1))
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 files .* two\.safetensors"):
        open_tensor_files(tmp_path)


def test_folder_without_weights_is_reported(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="has no safetensors files"):
        open_tensor_files(tmp_path)


def test_shards_without_an_index_are_reported(tmp_path) -> None:
    write(tmp_path, "one.safetensors", a=torch.zeros(1))
    write(tmp_path, "two.safetensors", b=torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"2 safetensors files but no model\.safetensors\."):
        open_tensor_files(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}'],
)
def test_unusable_index_is_reported(tmp_path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_tensor_files(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -4], ids=str)
def test_half_written_file_is_reported(tmp_path, kept: int) -> None:
    file = write(tmp_path, "model.safetensors", a=torch.zeros(64))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"half-written|not a whole safetensors file"):
        open_tensor_files(tmp_path)


def test_file_with_bytes_left_over_is_reported(tmp_path) -> None:
    file = write(tmp_path, "model.safetensors", a=torch.zeros(4))
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="its header states"):
        open_tensor_files(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}},
    ],
    ids=["array", "number", "no-offsets", "dtype", "shape", "offsets"],
)
def test_damaged_header_is_reported(tmp_path, header: object) -> None:
    file = raw_file(tmp_path, header, bytes(4))
    with pytest.raises(CheckpointError, match=r"header"):
        read_header(file)


def test_offsets_must_fit_the_shape(tmp_path) -> None:
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}
    with pytest.raises(CheckpointError, match=r"a is F32 \[2\], 8 bytes, but its offsets are 0..4"):
        read_header(raw_file(tmp_path, header, bytes(4)))


def test_header_that_is_not_json_is_reported(tmp_path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((4).to_bytes(8, "little") + b"abcd")
    with pytest.raises(CheckpointError, match="damaged safetensors header"):
        read_header(file)


def test_file_that_vanished_after_opening_is_reported(tmp_path) -> None:
    file = write(tmp_path, "model.safetensors", a=torch.zeros(4))
    files = open_tensor_files(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match="a cannot be read"):
        files.read("a")
