"""Membership: who is connected to whom. Its version is the generation.

Frozen values that cross process boundaries. Moving an expert never changes a membership; adding or
removing a worker does (DESIGN: membership and placement are two things).
"""

from __future__ import annotations

from dataclasses import dataclass

from configs.ids import Generation, WorkerId


@dataclass(frozen=True, slots=True)
class ExpertWorkerInfo:
    """How an expert worker is reached."""

    worker: WorkerId
    addresses: tuple[str, ...]
    """All its listeners, as `Listener.address` gives them, e.g. `shm:/run/x/expert-0.sock`."""
    host_token: str
    """Equal on two processes that really share memory: boot id and device of the socket folder."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The expert workers that an attention worker is connected to in one generation."""

    generation: Generation
    expert_workers: tuple[ExpertWorkerInfo, ...]
