"""Writes one safetensors file tensor by tensor, so that memory holds a few tensors at a time.

`safetensors.torch.save_file` needs all of them at once. The format is a length, a JSON header and
the bytes; the types of larger items come first, which keeps every tensor aligned for mapping.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.errors import InvariantError

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, type and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one type that are made together."""

    headers: tuple[TensorHeader, ...]
    make: Callable[[], tuple[Tensor, ...]]
    """Called once, when the group's turn comes."""


def write_tensor_file(
    file: Path, groups: Sequence[TensorGroup], on_written: Callable[[int], None]
) -> None:
    """Write a safetensors file.

    Args:
        file: Must not be read before this returns.
        groups: All tensors of the file.
        on_written: Called with the bytes of each tensor.

    Raises:
        InvariantError: A group made other tensors than it announced.
    """
    ordered = sorted(groups, key=lambda group: -group.headers[0].dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for group in ordered:
        for header in group.headers:
            entries[header.name] = {
                "dtype": _DTYPE_NAMES[header.dtype],
                "shape": list(header.shape),
                "data_offsets": [offset, offset + header.num_bytes],
            }
            offset += header.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for group in ordered:
            for header, tensor in zip(group.headers, group.make(), strict=True):
                if tensor.dtype != header.dtype or tuple(tensor.shape) != header.shape:
                    raise InvariantError(
                        f"{header.name} was made as {tensor.dtype} {list(tensor.shape)}, announced "
                        f"as {header.dtype} {list(header.shape)}"
                    )
                stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                on_written(header.num_bytes)
