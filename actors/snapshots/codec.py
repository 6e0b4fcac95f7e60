"""A copy of a request as bytes, and back. Bit for bit, or refused.

Layout, integers little-endian: magic, version (u16), length of the header (u32), length of the body
(u64), BLAKE2b-256 of all other bytes, header (msgpack), body (token ids, then the tensors, raw).
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from actors.engine.request_snapshot import RequestSnapshot
from configs.errors import SnapshotError
from model.cache import SlotCopy

SnapshotBytes = bytes | bytearray | memoryview
"""What holds an encoded copy. Not written once it is handed over."""

_MAGIC: Final = b"LMSN"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct("<4sHIQ")
_DIGEST_BYTES: Final = 32
_START_BYTES: Final = _PREFIX.size + _DIGEST_BYTES
_MAX_HEADER_BYTES: Final = 1 << 20
_MAX_RANK: Final = 8
_MAX_SIDE: Final = 1 << 40
_TOKEN_DTYPE: Final = np.dtype("<i4")
_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


class _TensorHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor; `shape` and `dtype` have been checked."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    num_prompt: int
    num_tokens: int
    state: _TensorHeader
    conv: _TensorHeader
    tokens: _TensorHeader


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_snapshot(snapshot: RequestSnapshot) -> bytes:
    """Return a copy as bytes; takes as many bytes again as the copy has.

    Raises:
        SnapshotError: A tensor has a type that does not travel, or the header is too large.
    """
    slot = snapshot.slot
    header = _encoder.encode(
        _Header(
            model=snapshot.model,
            num_prompt=snapshot.num_prompt,
            num_tokens=snapshot.position,
            state=_tensor_header(slot.state_AHDD),
            conv=_tensor_header(slot.conv_AJC),
            tokens=_tensor_header(snapshot.tokens_MTC),
        )
    )
    if len(header) > _MAX_HEADER_BYTES:
        raise SnapshotError(
            f"snapshot header of {len(header)} bytes exceeds {_MAX_HEADER_BYTES}; "
            "use a shorter model name"
        )
    body = [
        _view(torch.from_numpy(np.array(snapshot.token_ids_T, dtype=_TOKEN_DTYPE))),
        _view(slot.state_AHDD),
        _view(slot.conv_AJC),
        _view(snapshot.tokens_MTC),
    ]
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header), sum(part.nbytes for part in body))
    digest = _digest([memoryview(prefix), memoryview(header), *body])
    return b"".join([prefix, digest, header, *body])


def decode_snapshot(data: SnapshotBytes) -> RequestSnapshot:
    """Return the copy that `encode_snapshot` wrote; it shares no memory with `data`.

    Raises:
        SnapshotError: A bit differs, something is missing or follows, or it is no snapshot.
    """
    view = memoryview(data).cast("B")
    if len(view) < _START_BYTES:
        raise _damaged(f"{len(view)} bytes, at least {_START_BYTES} expected")
    magic, version, header_bytes, body_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise _damaged(f"it begins with {magic!r}, not {_MAGIC!r}")
    if version != _VERSION:
        raise _damaged(f"version {version}, this program reads {_VERSION}")
    if header_bytes > _MAX_HEADER_BYTES:
        raise _damaged(f"header of {header_bytes} bytes, at most {_MAX_HEADER_BYTES} expected")
    expected = _START_BYTES + header_bytes + body_bytes
    if len(view) != expected:
        raise _damaged(f"it has {len(view)} bytes, {expected} expected")
    digest = _digest([view[: _PREFIX.size], view[_START_BYTES:]])
    if digest != view[_PREFIX.size : _START_BYTES]:
        raise _damaged("its checksum differs")
    body_start = _START_BYTES + header_bytes
    header = _read_header(view[_START_BYTES:body_start])
    _check_header(header, body_bytes)
    return _read_body(header, view[body_start:])


def _tensor_header(tensor: Tensor) -> _TensorHeader:
    name = _DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise SnapshotError(
            f"a snapshot's tensor is {tensor.dtype}; only {', '.join(_DTYPES)} can be sent"
        )
    return _TensorHeader(name, list(tensor.shape))


def _view(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, not copied where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _digest(parts: list[memoryview]) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


def _read_header(data: memoryview) -> _Header:
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as exc:
        raise _damaged(f"its header cannot be read: {exc}") from exc


def _check_header(header: _Header, body_bytes: int) -> None:
    """Refuse what a good checksum does not exclude: a header that does not describe its body."""
    for name, tensor in (
        ("state", header.state),
        ("conv", header.conv),
        ("tokens", header.tokens),
    ):
        if tensor.dtype not in _DTYPES:
            raise _damaged(f"{name} has type {tensor.dtype!r}, one of {list(_DTYPES)} expected")
        shape = tensor.shape
        if len(shape) > _MAX_RANK or any(not 0 <= side <= _MAX_SIDE for side in shape):
            raise _damaged(
                f"{name} has {len(shape)} axes of {shape[:_MAX_RANK]}, at most {_MAX_RANK} "
                f"from 0 to {_MAX_SIDE} expected"
            )
    if header.num_tokens < 1 or header.num_prompt < 0:
        raise _damaged(
            f"{header.num_tokens} tokens and a prompt of {header.num_prompt}, "
            "at least 1 and 0 expected"
        )
    shape = header.tokens.shape
    if len(shape) != 3 or shape[1] != header.num_tokens:
        raise _damaged(f"cache of shape {shape} for {header.num_tokens} tokens")
    total = header.num_tokens * _TOKEN_DTYPE.itemsize
    total += header.state.num_bytes + header.conv.num_bytes + header.tokens.num_bytes
    if total != body_bytes:
        raise _damaged(f"its header describes {total} bytes, {body_bytes} are there")


def _read_body(header: _Header, body: memoryview) -> RequestSnapshot:
    start = header.num_tokens * _TOKEN_DTYPE.itemsize
    token_ids_T = np.frombuffer(body[:start], dtype=_TOKEN_DTYPE).astype(np.int32)
    token_ids_T.flags.writeable = False
    tensors = []
    for tensor_header in (header.state, header.conv, header.tokens):
        end = start + tensor_header.num_bytes
        tensors.append(_read_tensor(tensor_header, body[start:end]))
        start = end
    state_AHDD, conv_AJC, tokens_MTC = tensors
    return RequestSnapshot(
        model=header.model,
        num_prompt=header.num_prompt,
        token_ids_T=token_ids_T,
        slot=SlotCopy(state_AHDD, conv_AJC),
        tokens_MTC=tokens_MTC,
    )


def _read_tensor(header: _TensorHeader, data: memoryview) -> Tensor:
    # Copied: torch wants aligned memory, and the encoded bytes shall not live as long as a part.
    tensor = torch.empty(header.shape, dtype=_DTYPES[header.dtype])
    target = tensor.reshape(-1).view(torch.uint8).numpy()
    target[:] = np.frombuffer(data, dtype=np.uint8)
    return tensor


def _damaged(what: str) -> SnapshotError:
    return SnapshotError(f"not a whole snapshot: {what}; compute the request again")
