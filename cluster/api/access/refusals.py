"""Writes down who was turned away and why: counted always, logged at a bounded rate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Literal

from cluster.api.access.keys import Refusal
from cluster.telemetry import Metrics
from configs.metrics import REFUSED_ACCESS

Door = Literal["grpc", "http"]

LINES_PER_S: Final = 5.0
BURST: Final = 50
MAX_CHARACTERS: Final = 200

_logger = logging.getLogger(__name__)


class Refusals:
    """The record of one gateway's refusals. For one event loop."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        """Count into `metrics`; `clock` is monotonic, seconds."""
        self._metrics = metrics
        self._clock = clock
        self._budget = float(BURST)
        self._filled_at = clock()
        self._num_silent = 0

    def note(self, door: Door, reason: Refusal, who: str, why: str) -> None:
        """Count a refusal, and log it unless too many were logged just now.

        Args:
            door: Where it happened.
            reason: For the metric.
            who: Peer and what is known of the caller; never a secret.
            why: For a person.
        """
        self._metrics.add(REFUSED_ACCESS, door=door, reason=reason.value)
        now = self._clock()
        self._budget = min(BURST, self._budget + (now - self._filled_at) * LINES_PER_S)
        self._filled_at = now
        if self._budget < 1:
            self._num_silent += 1
            return
        self._budget -= 1
        silent = f" ({self._num_silent} more were not logged)" if self._num_silent else ""
        self._num_silent = 0
        _logger.warning(
            "refused at the %s door: %s: %s [%s]%s",
            door,
            printable(who),
            printable(why),
            reason.value,
            silent,
        )


def printable(text: str) -> str:
    """Return text that is one line of a log whatever it holds, and not a long one."""
    shown = "".join(c if c.isprintable() else "?" for c in text[: MAX_CHARACTERS + 1])
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[:MAX_CHARACTERS]}..."
