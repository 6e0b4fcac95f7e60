"""The bytes of a snapshot: exact there and back, and nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.snapshots.codec import decode_snapshot, encode_snapshot
from configs.errors import SnapshotError
from tests.fakes.snapshots import make_snapshot, same_bits


@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_every_bit_comes_back(num_tokens: int, dtype: torch.dtype, seed: int) -> None:
    snapshot = make_snapshot(num_tokens, dtype=dtype, seed=seed)
    assert same_bits(snapshot, decode_snapshot(encode_snapshot(snapshot)))


def test_values_that_compare_oddly_come_back() -> None:
    snapshot = make_snapshot(3)
    snapshot.tokens_MTC[0, 0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    assert same_bits(snapshot, decode_snapshot(encode_snapshot(snapshot)))


@settings(max_examples=200, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_refused(place: float, bit: int) -> None:
    data = bytearray(encode_snapshot(make_snapshot(5)))
    data[int(place * len(data))] ^= 1 << bit
    with pytest.raises(SnapshotError):
        decode_snapshot(data)


@pytest.mark.parametrize("num_bytes", [0, 1, 12, 100, -1], ids=str)
def test_a_part_of_it_is_refused(num_bytes: int) -> None:
    with pytest.raises(SnapshotError):
        decode_snapshot(encode_snapshot(make_snapshot(5))[:num_bytes])


def test_more_than_it_is_refused() -> None:
    with pytest.raises(SnapshotError, match="expected"):
        decode_snapshot(encode_snapshot(make_snapshot(5)) + b"\0")


def test_what_is_decoded_is_its_own() -> None:
    data = bytearray(encode_snapshot(make_snapshot(5)))
    snapshot = decode_snapshot(data)
    before = snapshot.tokens_MTC.clone()
    data[:] = bytes(len(data))
    assert torch.equal(snapshot.tokens_MTC, before)
    assert snapshot.token_ids_T.dtype == np.int32
