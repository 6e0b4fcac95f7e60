"""A snapshot vault in a process of its own, to be killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_PROGRAM = """
import sys
from actors.snapshots.memory import MemoryVault
from actors.snapshots.server import VaultServer
print(VaultServer(MemoryVault(1 << 24)).start(), flush=True)
sys.stdin.read()
"""


_STALLING_PROGRAM = """
import sys
from tests.fakes.stalling_vault import StallingVault
with StallingVault() as vault:
    print(vault.address, flush=True)
    vault.is_in_transfer.wait()
    print("in transfer", flush=True)
    sys.stdin.read()
"""


def vault_process() -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """The process and its vault's address; ends the process."""
    return _process(_PROGRAM)


def stalling_vault_process() -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    """The same with a `StallingVault`; the process prints a line when it is in a transfer."""
    return _process(_STALLING_PROGRAM)


@contextmanager
def _process(program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()
