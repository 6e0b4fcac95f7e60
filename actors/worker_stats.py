"""What a worker reports about itself. Frozen values that cross process boundaries."""

from __future__ import annotations

from dataclasses import dataclass

from configs.ids import WorkerId


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Where a worker runs."""

    worker: WorkerId
    pid: int
    node_id: str
    """Machine, as Ray names it."""


@dataclass(frozen=True, slots=True)
class AttentionServiceStats:
    """Levels and totals of an attention worker. Totals only grow."""

    running_requests: int
    queued_requests: int
    used_blocks: int
    total_blocks: int
    used_slots: int
    total_slots: int
    prompt_tokens: int
    output_tokens: int
    latent_bytes_sent: int
    """Latents alone."""
    wire_bytes_sent: int
    """All bytes to expert workers."""
    wire_bytes_received: int
    latents_sent: int
    """(token, expert worker) latents."""
    memory_bytes: int
    """Weights, blocks and slots."""
    transports: tuple[str, ...]
    """Per expert worker, in the order of the membership."""
    cached_blocks: int = 0
    """Held by prefix snapshots only."""
    prefix_snapshots: int = 0
    snapshot_bytes: int = 0
    """State copies of prefix snapshots and of preempted requests."""
    prefix_hits: int = 0
    """Requests that began at a prefix snapshot."""
    prefix_hit_tokens: int = 0
    """Tokens that these did not compute."""
    preemptions: int = 0
    restores: int = 0
    """Requests that went on from a copy of their memory."""
    recomputed_tokens: int = 0
    """Tokens that were given up without a copy."""
    moved_requests: int = 0
    """Handed to another worker."""


@dataclass(frozen=True, slots=True)
class ExpertServiceStats:
    """Levels and totals of an expert worker. Totals only grow."""

    num_expert_slots: int
    weight_bytes: int
    pairs: int
    weight_reads: int
    frames: int
    busy_s: float
