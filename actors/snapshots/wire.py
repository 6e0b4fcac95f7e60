"""What is said to a vault's server: small messages, and raw bytes between them.

A message is a little-endian uint32 length and a msgpack map with a `type` tag.
`Put` is answered by `Ready`, after which the client sends the bytes and gets `Stored`; `Get` by
`Found` and the bytes; `Drop` by `Stored`. `Refused` can stand for every answer. The next message
may follow on the same connection.
"""

from __future__ import annotations

import socket
from typing import Final, TypeVar

import msgspec

from configs.errors import FrameError

LENGTH_BYTES: Final = 4
MAX_MESSAGE_BYTES: Final = 4096
_MAX_PORT: Final = 65535


class Put(msgspec.Struct, frozen=True, tag="put"):
    """Store a copy of so many bytes."""

    name: str
    num_bytes: int


class Get(msgspec.Struct, frozen=True, tag="get"):
    """Send a copy."""

    name: str


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Forget a copy; one that is not there is as good."""

    name: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """There is room: send the bytes."""


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """It is done."""


class Found(msgspec.Struct, frozen=True, tag="found"):
    """So many bytes follow."""

    num_bytes: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It is not done."""

    message: str


Question = Put | Get | Drop
Answer = Ready | Stored | Found | Refused

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def pack(message: Question | Answer) -> bytes:
    """Return length and body of a message. Raises `FrameError` when it is too large."""
    body = _encoder.encode(message)
    _check_length(len(body))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def unpack_length(data: bytes) -> int:
    """Return the length that a message's first bytes state; `FrameError` if too large."""
    length = int.from_bytes(data, "little")
    _check_length(length)
    return length


def unpack(body: bytes, kind: type[T]) -> T:
    """Parse the body of a message. Raises `FrameError` for anything but a `kind`."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as exc:
        raise FrameError(f"not a message of a snapshot vault: {exc}") from exc


def split_tcp(rest: str) -> tuple[str, int] | None:
    """Return host and port of `<host>:<port>`, or None when it is not that."""
    host, _, port = rest.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or len(port) > len(str(_MAX_PORT)):
        return None
    return (host, int(port)) if int(port) <= _MAX_PORT else None


def send_at_once(sock: socket.socket) -> None:
    """Let small messages not wait for acknowledgements of earlier ones."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _check_length(length: int) -> None:
    if length > MAX_MESSAGE_BYTES:
        raise FrameError(
            f"snapshot message of {length} bytes exceeds {MAX_MESSAGE_BYTES}; is it a vault?"
        )
