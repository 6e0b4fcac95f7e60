"""The safetensors files of a checkpoint folder: headers checked, tensors read by memory map.

Knows the format, not the model. A header is trusted only after its offsets were checked against the
size of the file, so that a half-written file is an error when the folder is opened, not a crash
while it serves.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
_ITEM_BYTES |= {"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies and what the header says it is."""

    name: str
    file: Path
    dtype: str
    """As in the header: `BF16`, `F32`, `U8`, ..."""
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """Values stored."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes stored."""
        return self.num_values * _ITEM_BYTES[self.dtype]


class _OpenFile(Protocol):
    """The part of `safetensors.safe_open` that is used."""

    def get_tensor(self, name: str) -> Tensor: ...


@dataclass
class TensorFiles:
    """The tensors of a folder by stored name. Files are mapped when first read and stay mapped."""

    tensors: dict[str, StoredTensor]
    index_problems: tuple[str, ...] = ()
    """Disagreements between the index and the files, one line each."""
    _open_files: dict[Path, _OpenFile] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> Tensor:
        """Return a CPU tensor that may alias the mapped file; copy it before keeping it.

        Raises:
            CheckpointError: The file has become unreadable since it was opened.
        """
        stored = self.tensors[name]
        try:
            opened = self._open_files.get(stored.file)
            if opened is None:
                opened = _map(stored.file)
                self._open_files[stored.file] = opened
            return opened.get_tensor(name)
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(
                f"{stored.file}: {name} cannot be read: {exc}; restore the file"
            ) from exc


def open_tensor_files(folder: Path) -> TensorFiles:
    """Read and check the headers of a checkpoint folder; no tensor data is read.

    Raises:
        CheckpointError: No safetensors files, files of the index missing, or a damaged file.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return TensorFiles(read_header(_only_file(folder)))
    weight_map = _read_index(index)
    files = sorted({folder / name for name in weight_map.values()})
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(
            f"checkpoint {folder} lacks {len(absent)} of the {len(files)} files of {INDEX_FILE}, "
            f"first {absent[0]}; finish the copy"
        )
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for file in files:
        for name, stored in read_header(file).items():
            if name in tensors:
                problems.append(f"{name}: in {tensors[name].file.name} and again in {file.name}")
            elif weight_map.get(name) != file.name:
                says = weight_map.get(name, "nothing")
                problems.append(f"{name}: in {file.name}, but the index says {says}")
            tensors[name] = stored
    problems.extend(
        f"{name}: the index says {file}, which does not hold it"
        for name, file in weight_map.items()
        if name not in tensors
    )
    return TensorFiles(tensors, tuple(problems))


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Parse and check the header of one file.

    Raises:
        CheckpointError: Not a safetensors file, or its length is not what the header states.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = file.stat().st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(
                    f"{file} is not a whole safetensors file: {file_bytes} bytes, header length "
                    f"says {header_bytes}; copy it again"
                )
            header = json.loads(stream.read(header_bytes))
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{file} has a damaged safetensors header: {exc}") from exc
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a safetensors header that is not an object")
    header.pop("__metadata__", None)
    tensors = {}
    end_of_data = 0
    for name, entry in header.items():
        tensors[name], end = _read_entry(file, name, entry)
        end_of_data = max(end_of_data, end)
    expected_bytes = 8 + header_bytes + end_of_data
    if expected_bytes != file_bytes:
        raise CheckpointError(
            f"{file} has {file_bytes} bytes, its header states {expected_bytes}: it is "
            "half-written or damaged; copy it again"
        )
    return tensors


def _read_entry(file: Path, name: str, entry: object) -> tuple[StoredTensor, int]:
    """One header entry and the offset where its data ends."""
    try:
        fields: dict[str, Any] = dict(entry)  # type: ignore[call-overload]  # checked by the except
        shape = tuple(int(size) for size in fields["shape"])
        begin, end = (int(offset) for offset in fields["data_offsets"])
        stored = StoredTensor(name, file, str(fields["dtype"]), shape)
        is_consistent = begin >= 0 and end - begin == stored.num_bytes
    except (KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{file}: header entry of {name} is damaged: {entry!r}") from exc
    if not is_consistent:
        raise CheckpointError(
            f"{file}: {name} is {stored.dtype} {list(shape)}, {stored.num_bytes} bytes, but its "
            f"offsets are {begin}..{end}"
        )
    return stored, end


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except OSError as exc:
        raise CheckpointError(f"{index} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{index} is not a safetensors index: {exc!r}") from exc
    is_map = isinstance(weight_map, dict) and weight_map
    if not is_map or any(not isinstance(f, str) or "/" in f for f in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must map tensor names to files of the folder")
    return dict(weight_map)


def _only_file(folder: Path) -> Path:
    """The one safetensors file of a folder without an index."""
    single = folder / SINGLE_FILE
    if single.exists():
        return single
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise CheckpointError(
            f"checkpoint {folder} has no safetensors files; expected {SINGLE_FILE}, or shards and "
            f"{INDEX_FILE}"
        )
    raise CheckpointError(
        f"checkpoint {folder} has {len(found)} safetensors files but no {INDEX_FILE}; copy it too"
    )


def _map(file: Path) -> _OpenFile:
    opened: _OpenFile = safe_open(file, framework="pt", device="cpu")
    return opened
