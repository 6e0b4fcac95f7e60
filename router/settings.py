"""What a router needs to know, fixed when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from configs.numerics import Combine, FloatType
from router.transport.connect import TransportChoice


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of one `LatentRouter`."""

    latent_size: int
    """Values of a latent."""
    wire_dtype: FloatType = FloatType.FLOAT32
    """Type of latents and answers on the wire."""
    combine: Combine = Combine.CANONICAL
    """What expert workers answer with."""
    dispatch_timeout_s: float = 30.0
    """A dispatch without all answers fails after this many seconds."""
    connect_timeout_s: float = 30.0
    """Connecting all workers of a membership fails after this many seconds."""
    shm_bytes: int = 8 << 20
    """Shared memory per direction of a pair; larger payloads take the socket."""
    spin_s: float = 0.0002
    """A waiting reader polls this long before it sleeps in the kernel, seconds."""
    transport: TransportChoice = "auto"
    """How expert workers are reached."""


@dataclass(frozen=True, slots=True)
class RouterCounters:
    """What a router has sent and received since it was made. Only grows."""

    frames_out: int
    """Dispatch frames: one per (dispatch, expert worker that was needed)."""
    tokens_out: int
    """Latents sent: one per (token, expert worker)."""
    pairs_out: int
    """(token, expert) picks dispatched."""
    latent_bytes_out: int
    """Bytes of latents."""
    pair_bytes_out: int
    """Bytes of pair records."""
    header_bytes_out: int
    """Bytes of frame headers."""
    bytes_in: int
    """Bytes of answers, headers included."""
    frames_in: int
    """Answers and failures received."""
    late_frames_in: int
    """Of these, answers to calls that were given up."""

    @property
    def bytes_out(self) -> int:
        """All bytes sent in frames."""
        return self.latent_bytes_out + self.pair_bytes_out + self.header_bytes_out
