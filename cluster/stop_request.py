"""What a user's signals ask of a launch: stop, and, asked twice, stop at once."""

from __future__ import annotations

import threading


class StopRequestedError(Exception):
    """Ends a wait because the user asked to stop. Never leaves `cluster/launch.py`."""


class StopRequest:
    """Counts requests to stop. `ask` may be called from a signal handler."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._asked_twice = threading.Event()

    def ask(self) -> None:
        """Ask to stop; asked again, to stop without draining."""
        if self._asked.is_set():
            self._asked_twice.set()
        self._asked.set()

    @property
    def is_asked(self) -> bool:
        """Whether anybody asked."""
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until somebody asks; return whether somebody did."""
        return self._asked.wait(timeout_s)

    def check_asked(self) -> None:
        """Raise `StopRequestedError` when somebody asked to stop."""
        if self._asked.is_set():
            raise StopRequestedError

    def check_asked_twice(self) -> None:
        """Raise `StopRequestedError` when somebody asked to stop at once."""
        if self._asked_twice.is_set():
            raise StopRequestedError
