from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import FrameError
from configs.numerics import Combine, FloatType
from router.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameHeader,
    FrameKind,
    combine_payload_bytes,
    decode_header,
    decode_placed_header,
    encode_header,
)
from tests.fakes.frame_making import dispatch_header


@st.composite
def headers(draw: st.DrawFn) -> FrameHeader:
    return dispatch_header(
        num_tokens=draw(st.integers(0, 512)),
        num_pairs=draw(st.integers(0, 8192)),
        latent_size=draw(st.integers(1, 8192)),
        wire_dtype=draw(st.sampled_from(FloatType)),
        combine=draw(st.sampled_from(Combine)),
        generation=draw(st.integers(0, 2**32 - 1)),
        epoch=draw(st.integers(0, 2**64 - 1)),
        step=draw(st.integers(0, 2**64 - 1)),
        layer=draw(st.integers(0, 2**16 - 1)),
        lane=draw(st.integers(0, 2**16 - 1)),
        attempt=draw(st.integers(0, 2**16 - 1)),
    )


@given(headers())
def test_every_header_survives_its_bytes(header: FrameHeader) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES == 64
    assert decode_header(data) == header


@given(headers(), st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_the_place_of_a_payload_travels_beside_the_header(
    header: FrameHeader, place: int, position: int
) -> None:
    data = encode_header(header, place=place, position=position)
    assert decode_placed_header(data) == (header, place, position)
    assert decode_header(data) == header


def test_the_call_is_equal_in_a_dispatch_and_its_answer() -> None:
    header = dispatch_header(step=5, layer=3, lane=1, attempt=2)
    assert header.call == (5, 3, 1, 2)


@pytest.mark.parametrize(
    ("combine", "expected"),
    [(Combine.CANONICAL, 12 * 256 * 2), (Combine.PRESUM, 3 * 256 * 2)],
    ids=["canonical", "presum"],
)
def test_an_answer_has_a_row_per_pair_or_per_token(combine: Combine, expected: int) -> None:
    assert expected == combine_payload_bytes(
        num_tokens=3,
        num_pairs=12,
        latent_size=256,
        wire_dtype=FloatType.BFLOAT16,
        combine=combine,
    )


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"\x00\x00\x00\x00", "magic is 0x00000000"),
        (4, b"\x63\x00", "version is 99"),
        (6, b"\x09", "unknown code: kind 9"),
        (7, b"\x07", "dtype 7"),
        (8, b"\x07", "combine 7"),
        (56, struct.pack("<Q", 1), "states 1 payload bytes, expected 16"),
        (56, struct.pack("<Q", MAX_PAYLOAD_BYTES + 1), "exceeds 1073741824"),
    ],
    ids=["magic", "version", "kind", "dtype", "combine", "length", "too-large"],
)
def test_a_wrong_field_is_named(offset: int, value: bytes, message: str) -> None:
    data = bytearray(encode_header(dispatch_header()))
    data[offset : offset + len(value)] = value
    with pytest.raises(FrameError, match=message):
        decode_header(data)


def test_a_cut_header_is_refused() -> None:
    with pytest.raises(FrameError, match="63 bytes, expected 64"):
        decode_header(encode_header(dispatch_header())[:63])


def test_a_failure_has_a_payload_of_any_length() -> None:
    data = bytearray(encode_header(dispatch_header()))
    data[6] = FrameKind.FAILURE
    data[56:64] = struct.pack("<Q", 123)
    assert decode_header(data).payload_bytes == 123
