"""The streaming safetensors writer against the library's reader."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from configs.errors import InvariantError
from model.tensor_file_writing import TensorGroup, TensorHeader, write_tensor_file


def group(name: str, tensor: torch.Tensor) -> TensorGroup:
    header = TensorHeader(name, tensor.dtype, tuple(tensor.shape))
    return TensorGroup((header,), lambda: (tensor,))


def test_library_reads_back_what_was_written(tmp_path) -> None:
    tensors = {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(3, 5).bfloat16(),
        "full": torch.randn(2, 1, 4),
        "turned": torch.randn(4, 3).T,
        "empty": torch.zeros(0, 4),
    }
    file = tmp_path / "a.safetensors"
    write_tensor_file(file, [group(n, t) for n, t in tensors.items()], lambda _: None)
    read = load_file(file)
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_written_bytes_are_reported_in_order_of_item_size(tmp_path) -> None:
    steps: list[int] = []
    groups = [group("a", torch.zeros(3, dtype=torch.uint8)), group("b", torch.zeros(2))]
    write_tensor_file(tmp_path / "a.safetensors", groups, steps.append)
    assert steps == [8, 3]


def test_tensors_are_made_one_group_at_a_time(tmp_path) -> None:
    events: list[str] = []

    def make(name: str):
        def produce():
            events.append(f"make {name}")
            return (torch.zeros(2),)

        return TensorGroup((TensorHeader(name, torch.float32, (2,)),), produce)

    write_tensor_file(
        tmp_path / "a.safetensors", [make("a"), make("b")], lambda _: events.append("written")
    )
    assert events == ["make a", "written", "make b", "written"]


@pytest.mark.parametrize(
    "made", [torch.zeros(3), torch.zeros(2, dtype=torch.uint8)], ids=["shape", "dtype"]
)
def test_tensor_other_than_announced_is_refused(tmp_path, made: torch.Tensor) -> None:
    announced = TensorGroup((TensorHeader("a", torch.float32, (2,)),), lambda: (made,))
    with pytest.raises(InvariantError, match="a was made as"):
        write_tensor_file(tmp_path / "a.safetensors", [announced], lambda _: None)
