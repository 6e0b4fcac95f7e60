"""A good checksum over nonsense is still nonsense: sizes are checked before memory is taken."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.request_snapshot import RequestSnapshot
from actors.snapshots import codec
from actors.snapshots.codec import decode_snapshot, encode_snapshot
from configs.errors import SnapshotError
from model.cache import SlotCopy
from tests.fakes.snapshots import make_snapshot, same_bits

GOOD: dict[str, Any] = {
    "model": "m",
    "num_prompt": 1,
    "num_tokens": 2,
    "state": ["float32", [1, 2]],
    "conv": ["bfloat16", [3]],
    "tokens": ["float32", [1, 2, 1]],
}
BODY = bytes(2 * 4 + 8 + 6 + 8)


def sealed(header: bytes, body: bytes = BODY, version: int = 1) -> bytes:
    prefix = codec._PREFIX.pack(codec._MAGIC, version, len(header), len(body))
    digest = hashlib.blake2b(prefix + header + body, digest_size=32).digest()
    return prefix + digest + header + body


def test_the_good_header_is_good() -> None:
    snapshot = decode_snapshot(sealed(msgspec.msgpack.encode(GOOD)))
    assert (snapshot.model, snapshot.position, snapshot.slot.conv_AJC.shape) == ("m", 2, (3,))


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 0},
        {"num_tokens": -1},
        {"num_tokens": 1},
        {"num_tokens": 1 << 62},
        {"num_prompt": -1},
        {"state": ["float32", [1 << 62, 1 << 62]]},
        {"state": ["float32", [-1, -2]]},
        {"state": ["float32", [1] * 9]},
        {"state": ["int32", [1, 2]]},
        {"state": ["float32", [3]]},
        {"state": ["float32", [2], 1]},
        {"state": None},
        {"conv": ["bfloat16", [1 << 39]]},
        {"tokens": ["float32", [2]]},
        {"tokens": ["float32", [2, 1, 1]]},
        {"model": 5},
        {"more": 1},
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_its_body_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError):
        decode_snapshot(sealed(msgspec.msgpack.encode(GOOD | change)))


@pytest.mark.parametrize("header", [b"", b"\xc1", b"\x80", b"\xff" * 10], ids=ascii)
def test_what_is_no_header_is_refused(header: bytes) -> None:
    with pytest.raises(SnapshotError):
        decode_snapshot(sealed(header))


def test_another_version_is_refused_and_named() -> None:
    with pytest.raises(SnapshotError, match="version 2, this program reads 1"):
        decode_snapshot(sealed(msgspec.msgpack.encode(GOOD), version=2))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for candidate in (data, b"LMSN\1\0" + data, sealed(data)):
        with pytest.raises(SnapshotError):
            decode_snapshot(candidate)


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=24, max_size=24))
def test_every_pattern_of_bits_comes_back_in_both_types(bits: bytes) -> None:
    raw = torch.from_numpy(np.frombuffer(bytearray(bits), dtype=np.uint8))
    snapshot = RequestSnapshot(
        "m",
        1,
        np.array([7, 2**31 - 1], dtype=np.int32),
        SlotCopy(raw.view(torch.float32).clone(), raw.view(torch.bfloat16).clone()),
        raw.view(torch.bfloat16).reshape(3, 2, 2).clone(),
    )
    assert same_bits(snapshot, decode_snapshot(encode_snapshot(snapshot)))


def test_every_flipped_bit_of_the_beginning_is_refused() -> None:
    data = bytearray(encode_snapshot(make_snapshot(2)))
    for place in range(8 * 80):
        data[place // 8] ^= 1 << place % 8
        with pytest.raises(SnapshotError):
            decode_snapshot(data)
        data[place // 8] ^= 1 << place % 8
    decode_snapshot(data)


def test_every_truncation_is_refused() -> None:
    data = encode_snapshot(make_snapshot(1))
    for end in range(len(data)):
        with pytest.raises(SnapshotError):
            decode_snapshot(memoryview(data)[:end])


def test_a_model_without_layers_of_one_kind_travels_too() -> None:
    empty = torch.zeros(0, 2, 3)
    snapshot = RequestSnapshot(
        "m", 0, np.array([1, 2], dtype=np.int32), SlotCopy(empty, empty), torch.zeros(0, 2, 6)
    )
    assert same_bits(snapshot, decode_snapshot(encode_snapshot(snapshot)))


def test_tensors_that_are_not_contiguous_travel_as_what_they_hold() -> None:
    turned = torch.arange(6.0).reshape(2, 3).T
    snapshot = RequestSnapshot(
        "m",
        0,
        np.array([1, 0, 2, 0], dtype=np.int32)[::2],
        SlotCopy(turned, turned),
        torch.arange(8.0).reshape(2, 2, 2).transpose(0, 2),
    )
    copy = decode_snapshot(encode_snapshot(snapshot))
    assert torch.equal(copy.slot.state_AHDD, turned)
    assert torch.equal(copy.tokens_MTC, snapshot.tokens_MTC)
    assert copy.token_ids_T.tolist() == [1, 2]
