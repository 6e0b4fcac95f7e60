"""The two numeric promises (docs/architecture.md, "Numerics") and the names of data types."""

from __future__ import annotations

from enum import StrEnum


class Numerics(StrEnum):
    """How results may depend on what else runs."""

    FAST = "fast"
    """Equal within tolerance; batch shapes may change low bits."""
    INVARIANT = "invariant"
    """Same request, same bits: whatever is batched beside it and wherever its experts live."""


class FloatType(StrEnum):
    """Floating-point type of compute or of latents on the wire."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def num_bytes(self) -> int:
        """Bytes per value."""
        return 4 if self is FloatType.FLOAT32 else 2


class Combine(StrEnum):
    """What an expert worker answers with."""

    CANONICAL = "canonical"
    """One row per (token, expert) pair; summed by the attention worker in ascending expert id."""
    PRESUM = "presum"
    """One weighted partial sum per token and worker: fewer bytes, order depends on placement."""


class EndReason(StrEnum):
    """The one way an accepted request ended, or one worker's attempt at it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REJECTED = "rejected"
    FAILED = "failed"
    MOVED = "moved"
    """Of an attempt only: its worker gives it up while it drains; the next attempt goes on."""


class FinishReason(StrEnum):
    """Why a request with `EndReason.FINISHED` stopped."""

    STOP = "stop"
    LENGTH = "length"
