"""The frame: one message of the data plane, and the only layout of its bytes.

A frame is a fixed little-endian header and a payload of known length. The header may travel on
another channel than the payload (host channel and NCCL), so it holds every count and shape needed
to post the exact receive. Decoding checks each length before any of it is believed.

Payload of DISPATCH: latents `[num_tokens, latent_size]` in wire dtype; then `num_pairs` records, as
three arrays: token row uint32, routing weight float32, logical expert uint32. Rows count within
this frame: a latent travels once to a worker, however many of its experts live there.
Payload of COMBINE, canonical: `[num_pairs, latent_size]` in the order of the dispatch's pairs;
presum: `[num_tokens, latent_size]`, the weighted sums over the worker's pairs. Wire dtype.
Payload of FAILURE: UTF-8 text, `code: message`.

Header bytes are `HEADER_BYTES`; pair bytes are `PAIR_BYTES` each. One byte and one word of the
header (`decode_placed_header`) belong to the transport: they say where the payload lies.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

from configs.errors import FrameError
from configs.ids import Epoch, Generation
from configs.numerics import Combine, FloatType

MAGIC = 0x314D464C  # "LFM1"
VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 30
PAIR_BYTES = 12

_HEADER = struct.Struct("<IHBBBBHHIQQHIIIIIQ")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """What a frame carries."""

    DISPATCH = 1
    COMBINE = 2
    FAILURE = 3


_DTYPE_CODES = {FloatType.FLOAT32: 1, FloatType.BFLOAT16: 2}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}
_COMBINE_CODES = {Combine.CANONICAL: 1, Combine.PRESUM: 2}
_COMBINES = {code: combine for combine, code in _COMBINE_CODES.items()}


_KINDS = {int(kind): kind for kind in FrameKind}


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Everything about a frame but its payload.

    A msgspec struct: a frozen dataclass of this size takes longer to make than a frame to send.
    """

    kind: FrameKind
    generation: Generation
    epoch: Epoch
    step: int
    """Step of the attention worker; with layer, lane and attempt it names the call."""
    layer: int
    lane: int
    """Micro-batch within the step."""
    attempt: int
    """0 for the first sending of a dispatch, +1 for each re-sending."""
    num_tokens: int
    num_pairs: int
    latent_size: int
    wire_dtype: FloatType
    combine: Combine
    payload_bytes: int

    @property
    def call(self) -> tuple[int, int, int, int]:
        """(step, layer, lane, attempt): equal in a dispatch and its answer."""
        return (self.step, self.layer, self.lane, self.attempt)


def dispatch_payload_bytes(
    *, num_tokens: int, num_pairs: int, latent_size: int, wire_dtype: FloatType
) -> int:
    """Bytes of a dispatch payload."""
    return num_tokens * latent_size * wire_dtype.num_bytes + num_pairs * PAIR_BYTES


def combine_payload_bytes(
    *, num_tokens: int, num_pairs: int, latent_size: int, wire_dtype: FloatType, combine: Combine
) -> int:
    """Bytes of a combine payload."""
    rows = num_pairs if combine is Combine.CANONICAL else num_tokens
    return rows * latent_size * wire_dtype.num_bytes


def encode_header(header: FrameHeader, *, place: int = 0, position: int = 0) -> bytes:
    """Return the `HEADER_BYTES` bytes of a header.

    Args:
        header: What to encode.
        place: The transport's own: 0 when the payload follows on the same channel.
        position: The transport's own: where in that place, in its unit.
    """
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        _DTYPE_CODES[header.wire_dtype],
        _COMBINE_CODES[header.combine],
        place,
        header.layer,
        header.lane,
        header.generation,
        header.epoch,
        header.step,
        header.attempt,
        position,
        header.num_tokens,
        header.num_pairs,
        header.latent_size,
        0,
        header.payload_bytes,
    )


def decode_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Parse and check a header.

    Raises:
        FrameError: Wrong length, magic, version or code, or counts that do not give the payload.
    """
    return decode_placed_header(data)[0]


def decode_placed_header(data: bytes | bytearray | memoryview) -> tuple[FrameHeader, int, int]:
    """Parse and check a header; return it with (place, position) as given to `encode_header`.

    Raises:
        FrameError: As `decode_header`.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"frame header has {len(data)} bytes, expected {HEADER_BYTES}")
    (magic, version, kind, dtype, combine, place, layer, lane, generation, epoch, step,
     attempt, position, num_tokens, num_pairs, latent_size, _,
     payload_bytes) = _HEADER.unpack(data)  # fmt: skip
    if magic != MAGIC:
        raise FrameError(f"frame magic is {magic:#010x}, expected {MAGIC:#010x}")
    if version != VERSION:
        raise FrameError(f"frame version is {version}, this build speaks {VERSION}")
    try:
        header = FrameHeader(
            kind=_KINDS[kind],
            generation=generation,
            epoch=epoch,
            step=step,
            layer=layer,
            lane=lane,
            attempt=attempt,
            num_tokens=num_tokens,
            num_pairs=num_pairs,
            latent_size=latent_size,
            wire_dtype=_DTYPES[dtype],
            combine=_COMBINES[combine],
            payload_bytes=payload_bytes,
        )
    except KeyError as exc:
        raise FrameError(
            f"frame has an unknown code: kind {kind}, dtype {dtype}, combine {combine}"
        ) from exc
    check_lengths(header)
    return header, place, position


def check_lengths(header: FrameHeader) -> None:
    """Raise `FrameError` unless the counts of a header give its payload length."""
    payload_bytes = header.payload_bytes
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise FrameError(f"frame payload of {payload_bytes} bytes exceeds {MAX_PAYLOAD_BYTES}")
    kind = header.kind
    if kind is FrameKind.FAILURE:
        return
    # Spelled out: this runs for every frame.
    row_bytes = header.latent_size * (4 if header.wire_dtype is FloatType.FLOAT32 else 2)
    if kind is FrameKind.DISPATCH:
        expected = header.num_tokens * row_bytes + header.num_pairs * PAIR_BYTES
    elif header.combine is Combine.CANONICAL:
        expected = header.num_pairs * row_bytes
    else:
        expected = header.num_tokens * row_bytes
    if payload_bytes != expected:
        raise FrameError(
            f"frame of {header.num_tokens} tokens, {header.num_pairs} pairs and latent "
            f"{header.latent_size} states {payload_bytes} payload bytes, expected {expected}"
        )
