"""Undoing what was done, in reverse order, whatever goes wrong on the way."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from configs.errors import ServingError

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    action: Callable[[], None]


class Unwinding:
    """A stack of steps. Each step bounds its own time."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    def add(self, name: str, action: Callable[[], None]) -> None:
        """Remember how to undo what is about to be, or was just, done."""
        self._steps.append(_Step(name, action))

    def run(self) -> list[str]:
        """Undo everything, last first, and return the names of steps that failed. Idempotent."""
        failed = []
        while self._steps:
            step = self._steps.pop()
            try:
                step.action()
            except (ServingError, OSError, RuntimeError):
                # The steps below still have to run: they end processes and remove files.
                _logger.exception("stopping: %s failed", step.name)
                failed.append(step.name)
        return failed
