"""Failures that are none of our exceptions: logged, counted, never told to a client."""

from __future__ import annotations

import logging

from cluster.telemetry import Metrics
from configs.metrics import INTERNAL_ERRORS

_log = logging.getLogger(__name__)


class UnforeseenErrors:
    """Takes note of them."""

    def __init__(self, metrics: Metrics) -> None:
        """Count in `metrics`."""
        self._metrics = metrics

    def note(self, path: str, error: BaseException) -> None:
        """Log and count one."""
        _log.error("unforeseen error in %s", path, exc_info=error)
        self._metrics.add(INTERNAL_ERRORS, method=path)
