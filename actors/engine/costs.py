"""What it costs to compute tokens and to copy memory, as measured, and what that decides.

Seconds are predictions from smoothed measurements of this worker. Deciding is pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

_SMOOTHING = 0.2
"""Weight of the newest measurement."""


class Way(StrEnum):
    """How a request gets back what it had in memory."""

    RESTORE = "restore"
    """From a copy."""
    RECOMPUTE = "recompute"
    """By prefill of its prompt and replay of its answer."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per unit of work. The defaults hold until something was measured."""

    prefill_s_per_token: float = 1e-4
    replay_s_per_token: float = 1e-2
    """A generated token that is computed again in decode form: a decode step of its own."""
    copy_bytes_per_s: float = 2e9
    """Between the memory of the model and the processor's."""
    send_bytes_per_s: float = 1e9
    """To another worker."""

    def measured(
        self,
        *,
        prefill_s_per_token: float | None = None,
        replay_s_per_token: float | None = None,
        copy_bytes_per_s: float | None = None,
        send_bytes_per_s: float | None = None,
    ) -> Costs:
        """Return the costs after one more measurement of what is given."""
        return replace(
            self,
            prefill_s_per_token=_smooth(self.prefill_s_per_token, prefill_s_per_token),
            replay_s_per_token=_smooth(self.replay_s_per_token, replay_s_per_token),
            copy_bytes_per_s=_smooth(self.copy_bytes_per_s, copy_bytes_per_s),
            send_bytes_per_s=_smooth(self.send_bytes_per_s, send_bytes_per_s),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """What a request has in memory."""

    num_prefilled: int
    """Prompt tokens to compute again without a copy, but those that a prefix snapshot keeps."""
    num_decoded: int
    """Tokens of the answer."""
    num_bytes: int
    """Of a copy of it."""


def recompute_s(progress: Progress, costs: Costs) -> float:
    """Predicted seconds of computing everything again."""
    return (
        progress.num_prefilled * costs.prefill_s_per_token
        + progress.num_decoded * costs.replay_s_per_token
    )


def decide_preemption(progress: Progress, costs: Costs, *, room_bytes: int) -> Way:
    """Return how a request that is preempted now should come back.

    A copy has to be written and read: twice its bytes. It needs room in the snapshot budget.
    """
    if progress.num_bytes > room_bytes:
        return Way.RECOMPUTE
    restore_s = 2 * progress.num_bytes / costs.copy_bytes_per_s
    return Way.RESTORE if restore_s < recompute_s(progress, costs) else Way.RECOMPUTE


def decide_move(progress: Progress, costs: Costs) -> Way:
    """Return how a request that moves to another worker should go on there.

    A copy is taken, sent, and put back; computing again is as fast there as here.
    """
    seconds = progress.num_bytes * (2 / costs.copy_bytes_per_s + 1 / costs.send_bytes_per_s)
    return Way.RESTORE if seconds < recompute_s(progress, costs) else Way.RECOMPUTE


def _smooth(old: float, new: float | None) -> float:
    return old if new is None else old + _SMOOTHING * (new - old)
