"""All processes that came from this one, also those whose parents have ended."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Callable
from typing import Final

import psutil

_PR_SET_CHILD_SUBREAPER: Final = 36
_ROUND_S: Final = 1.0

_logger = logging.getLogger(__name__)

Choice = Callable[[psutil.Process], bool]


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, for the rest of this process.

    Without it they go to process 1, where `end_descendants` cannot find them. Linux only; elsewhere
    nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(chosen: Choice, *, grace_s: float, timeout_s: float) -> list[psutil.Process]:
    """Wait for descendants to end on their own, then end them by force.

    Looks again until none is left: a process may start another one while it ends.

    Args:
        chosen: Which descendants; others are left alone.
        grace_s: How long they may take on their own.
        timeout_s: For all of it.

    Returns:
        Descendants that still run.
    """
    started = time.monotonic()
    while alive := _descendants(chosen):
        elapsed_s = time.monotonic() - started
        if elapsed_s >= timeout_s:
            return alive
        if elapsed_s >= grace_s:
            for process in alive:
                _kill(process)
        # Waiting also reaps the ones that were adopted.
        psutil.wait_procs(alive, timeout=_ROUND_S)
    return []


def _descendants(chosen: Choice) -> list[psutil.Process]:
    return [
        process for process in psutil.Process().children(recursive=True) if _is(process, chosen)
    ]


def _is(process: psutil.Process, chosen: Choice) -> bool:
    try:
        return chosen(process)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        _logger.warning("ending process %d (%s) by force", process.pid, process.name())
        process.kill()
    except psutil.NoSuchProcess:
        return
