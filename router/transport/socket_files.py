"""Names of socket files, and sweeping those whose owner died.

A name holds the owner's process id and start time, so that a reused process id is never mistaken
for the owner. The rings of shared memory have no files (`router/transport/ring.py`).
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

import psutil

MAX_SOCKET_PATH_BYTES = 107
_NAME = re.compile(r"^lm-(\d+)-(\d+)-\d+\.sock$")
_numbers = itertools.count()


def socket_path(directory: Path) -> Path:
    """Return a path for a new socket of this process; short, because sockets allow 107 bytes."""
    pid = os.getpid()
    return directory / f"lm-{pid}-{_start_time(pid)}-{next(_numbers)}.sock"


def sweep_stale(directory: Path) -> list[Path]:
    """Unlink the sockets in `directory` whose owner is gone, and return them."""
    if not directory.is_dir():
        return []
    stale = []
    for path in sorted(directory.iterdir()):
        match = _NAME.match(path.name)
        if match is None or _start_time(int(match[1])) == int(match[2]):
            continue
        path.unlink(missing_ok=True)
        stale.append(path)
    return stale


def _start_time(pid: int) -> int | None:
    """Start of a process in hundredths of a second, or None when there is no such process."""
    try:
        return round(psutil.Process(pid).create_time() * 100)
    except psutil.NoSuchProcess:
        return None
