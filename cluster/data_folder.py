"""The data folder of a cluster: locked against a second one.

The lock is an advisory `flock`, so it ends with its process whatever happens; the file beside it
only says who holds it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from configs.errors import ConfigError, DataDirInUseError

LOCK_FILE = "lock"
READY_FILE = "ready.json"
RUN_RECORD_FILE = "run-folder"
LOG_FOLDER = "logs"


class DataFolder:
    """A locked data folder. Held from `lock` until `unlock` or the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def lock(cls, path: Path) -> DataFolder:
        """Create the folder where needed and take its lock.

        Raises:
            DataDirInUseError: Another process holds it.
            ConfigError: The folder cannot be created or written.
        """
        path = path.absolute()
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / LOG_FOLDER).mkdir(exist_ok=True)
            descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise ConfigError(
                f"data_dir {path} cannot be used: {exc.strerror}; choose another folder"
            ) from exc
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise DataDirInUseError(
                f"data_dir {path} is in use by the cluster of process {holder}; stop that one or "
                f"choose another folder with --set data_dir=..."
            ) from exc
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        return cls(path, descriptor)

    @property
    def log_folder(self) -> Path:
        """Folder for log files; exists."""
        return self.path / LOG_FOLDER

    @property
    def ready_file(self) -> Path:
        """Addresses of the running cluster; there only while it serves."""
        return self.path / READY_FILE

    @property
    def run_record(self) -> Path:
        """Names the run folder of the running launch, so that the next one can clear it away."""
        return self.path / RUN_RECORD_FILE

    def unlock(self) -> None:
        """Give the lock back. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
