"""SIGINT and SIGTERM as requests to stop, kept that way while Ray has other plans.

Ray's C++ part takes SIGTERM for a crash: when a session starts it installs a handler that aborts
the process, and when the session ends it restores the default, which kills it. Handlers can only be
set by the main thread, so the main thread sets ours again while it waits for the launch.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

from cluster.stop_request import StopRequest

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
REARM_S: Final = 0.05
"""How long a foreign handler can stay in place."""


class StopSignals:
    """While entered, signals ask to stop. Of the main thread only."""

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._arm()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_for(self, thread: threading.Thread) -> None:
        """Wait until `thread` has ended; signals are taken meanwhile."""
        while thread.is_alive():
            self._arm()
            thread.join(REARM_S)

    def _arm(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._ask)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        self._stop.ask()
