"""The transport protocol: ordered, reliable frames between an attention and an expert worker.

A `Link` is one side of a connection. Links are synchronous and owned by one thread, and no call
blocks: what the peer has no room for is queued with its deadline and pushed by `flush`. So two
workers that send to each other at once cannot block each other as long as both read.
Header and payload may travel apart; a frame is handed out once both are complete. Closing is
idempotent, and a dead peer shows as `PeerClosedError` on the next call.

Deadlines are `time.monotonic()` seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.ids import Generation, WorkerId
from router.frames import FrameHeader

Bytes = NDArray[np.uint8]


class Frame(msgspec.Struct, frozen=True, gc=False):
    """A received frame. `payload` is a view of the link's buffer, valid until `Link.release`."""

    header: FrameHeader
    payload: Bytes
    token: int = 0
    """The link's own name for the buffer."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of an attention worker on a new link; the answer is the listener's own."""

    worker: WorkerId
    generation: Generation


class Link(Protocol):
    """One side of a connection."""

    @property
    def peer(self) -> WorkerId:
        """Who is on the other side."""

    @property
    def generation(self) -> Generation:
        """Membership generation the link was made in."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes queued because the peer had no room. Watch for writability while not 0."""

    def send(self, header: FrameHeader, parts: Sequence[Bytes], *, deadline: float) -> None:
        """Send or queue one frame; the parts are concatenated and may be reused on return.

        Args:
            header: States the payload length.
            parts: Contiguous uint8 arrays.
            deadline: When `flush` gives up on what could not be sent at once.

        Raises:
            FrameError: The parts do not add up to the stated length; nothing was sent.
            PeerClosedError: The peer is gone.
            TransportTimeoutError: Bytes are queued past their deadline; the link is closed.
        """

    def flush(self) -> bool:
        """Push queued bytes; return whether nothing is left. Never blocks.

        Raises:
            PeerClosedError: The peer is gone.
            TransportTimeoutError: The peer did not make room before a deadline; the link is closed.
        """

    def try_receive(self) -> Frame | None:
        """Return the next complete frame, or None. Never blocks.

        Raises:
            PeerClosedError: The peer is gone and nothing complete is left to read.
            FrameError: The peer sent something that is no frame; the link is closed.
        """

    def release(self, frame: Frame) -> None:
        """Give back the buffer of a frame from `try_receive`. In any order; once each."""

    def fileno(self) -> int:
        """Descriptor that is readable when `try_receive` may have something."""

    def close(self) -> None:
        """End the link and free its descriptors and memory. Idempotent."""


class Listener(Protocol):
    """Where an expert worker is reached."""

    @property
    def address(self) -> str:
        """What a peer connects to: `shm:<socket path>`, `tcp:<host>:<port>`, `local:<name>`."""

    def try_accept(self) -> Link | None:
        """Return the next connected peer after its hello, or None. Never blocks."""

    def fileno(self) -> int:
        """Descriptor that is readable when `try_accept` may have something."""

    def close(self) -> None:
        """Stop listening; links live on. Idempotent."""
