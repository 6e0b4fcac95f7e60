"""The terminal of a long-running command: our lines only; everything else goes to a log file.

Ray, its C++ parts and its child processes write to the descriptors 1 and 2 as they please. While a
command serves, these two lead to a log file, and our own lines go to copies of the real ones.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cluster.cli.worker_table import make_console

_STANDARD = (1, 2)


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where our own lines go."""

    out: Console
    errors: Console


@contextmanager
def own_terminal(log_file: Path) -> Iterator[Terminal]:
    """Send what anybody prints to `log_file`, and yield consoles on the real output and errors.

    Log records go to the file as well. The real descriptors are back at the end.
    """
    with ExitStack() as stack:
        saved = [os.dup(descriptor) for descriptor in _STANDARD]
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        streams = [
            stack.enter_context(os.fdopen(os.dup(descriptor), "w", buffering=1))
            for descriptor in saved
        ]
        consoles = [make_console(stream) for stream in streams]
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        root.addHandler(handler)
        level = root.level
        root.setLevel(logging.INFO)
        _redirect([log, log])
        os.close(log)
        try:
            yield Terminal(out=consoles[0], errors=consoles[1])
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            _redirect(saved)
            for descriptor in saved:
                os.close(descriptor)


def _redirect(targets: list[int]) -> None:
    """Make 1 and 2 lead where `targets` lead, with nothing left in Python's buffers."""
    sys.stdout.flush()
    sys.stderr.flush()
    for target, descriptor in zip(targets, _STANDARD, strict=True):
        os.dup2(target, descriptor)
