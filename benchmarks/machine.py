"""What this machine is, for the names of result files."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil


def hardware_name() -> str:
    """Return a short name of this machine for the file name, e.g. `epyc-2cores`."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{model.split()[-1].lower()}-{psutil.cpu_count()}cores"
