"""What a worker is told when it is made. Frozen values that cross process boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from configs.ids import WorkerId
from configs.numerics import FloatType, Numerics
from router.settings import RouterSettings
from router.transport.connect import TransportKind

NODE_HOST = "node"
"""In place of an address: that of the node where the worker turns out to run."""


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """How a worker of either pool computes."""

    checkpoint: Path
    mla_norm_eps: float
    dtype: FloatType
    numerics: Numerics
    device: str
    """`cpu` or `cuda`."""
    num_threads: int
    """CPU threads for matrix products."""


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """What an attention worker keeps, and how its requests move."""

    memory_bytes: int = 0
    """State copies for reuse and of preempted requests; 0 keeps none."""
    interval_tokens: int = 2048
    min_gain_tokens: int = 64
    copy_interval_tokens: int = 0
    """Running requests are copied away after so many new tokens; 0 never."""
    folder: Path | None = None
    """Where copies go that leave the worker; None sends them to other attention workers."""
    max_stored_bytes: int = 1 << 30
    """Copies of others in its memory, or of all in `folder`."""
    transfer_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class AttentionServiceSettings:
    """Everything about one attention worker."""

    worker: WorkerId
    compute: ComputeSettings
    router: RouterSettings
    context_tokens: int
    num_blocks: int
    block_tokens: int
    num_state_slots: int
    max_step_tokens: int
    max_queued_requests: int
    host: str | None
    """Address for the request channel, or `NODE_HOST`; None takes a Unix socket in `sockets`."""
    sockets: Path
    """Folder of the sockets of this launch."""
    snapshots: SnapshotSettings = SnapshotSettings()
    load_window_steps: int = 128
    """Steps whose picks per layer and expert are kept; 0 counts nothing."""


@dataclass(frozen=True, slots=True)
class ExpertServiceSettings:
    """Everything about one expert worker."""

    worker: WorkerId
    compute: ComputeSettings
    memory_bytes: int | None
    """Budget for expert slots; None leaves it to the machine."""
    merge_window_s: float
    spin_s: float
    transports: tuple[TransportKind, ...]
    """Listeners to open."""
    host: str
    """Address that TCP listeners bind, or `NODE_HOST`."""
    sockets: Path
    """Folder of the sockets of this launch."""
