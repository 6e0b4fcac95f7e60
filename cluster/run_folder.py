"""The run folder of one launch: a short private path for sockets and Ray's session files.

Unix sockets allow about 100 bytes of path, so they cannot live under a data folder of any depth.
The data folder records the path, so that a launch that was killed is tidied up by the next one.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from cluster.data_folder import DataFolder
from configs.environment import temporary_folder
from configs.errors import ConfigError

PREFIX = "lm-"
MAX_PATH_BYTES = 40
"""Ray adds about 65 bytes for its session and socket names."""
KEPT_LOG_FOLDERS = 5


class RunFolder:
    """A folder that exists while a launch runs."""

    def __init__(self, path: Path, data_folder: DataFolder) -> None:
        self.path = path
        self._data_folder = data_folder

    @classmethod
    def create(cls, data_folder: DataFolder) -> RunFolder:
        """Make a new run folder and clear that of a dead launch away.

        The caller holds the lock of `data_folder`, so a recorded folder has no living owner.

        Raises:
            ConfigError: The folder cannot be made, or its path is too long for sockets.
        """
        _remove_recorded(data_folder)
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=temporary_folder()))
        except OSError as exc:
            raise ConfigError(
                f"no run folder can be made in {temporary_folder()}: {exc.strerror}; "
                f"set TMPDIR to a writable folder"
            ) from exc
        length = len(str(path).encode())
        if length > MAX_PATH_BYTES:
            path.rmdir()
            raise ConfigError(
                f"run folder {path} has a path of {length} bytes, sockets allow {MAX_PATH_BYTES}; "
                f"set TMPDIR to a shorter folder"
            )
        data_folder.run_record.write_text(str(path), encoding="utf-8")
        return cls(path, data_folder)

    @property
    def sockets(self) -> Path:
        """Folder of the workers' sockets; made on first use."""
        path = self.path / "s"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    @property
    def ray(self) -> Path:
        """Folder for Ray's session."""
        return self.path / "r"

    @property
    def temporary(self) -> Path:
        """Folder for short-lived files of child processes; made on first use."""
        path = self.path / "t"
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    @property
    def valkey_socket(self) -> Path:
        """Socket of the embedded state server."""
        return self.path / "valkey.sock"

    def remove(self) -> None:
        """Keep Ray's log files in the data folder and delete everything else. Idempotent."""
        _keep_ray_logs(self.path, self._data_folder.log_folder)
        shutil.rmtree(self.path, ignore_errors=True)
        self._data_folder.run_record.unlink(missing_ok=True)


def _remove_recorded(data_folder: DataFolder) -> None:
    try:
        recorded = Path(data_folder.run_record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    # Only a folder that this class can have made is ever deleted.
    if recorded.name.startswith(PREFIX) and recorded.parent.is_dir():
        _keep_ray_logs(recorded, data_folder.log_folder)
        shutil.rmtree(recorded, ignore_errors=True)
    data_folder.run_record.unlink(missing_ok=True)


def _keep_ray_logs(run_folder: Path, log_folder: Path) -> None:
    """Move the logs of the real session (not the `session_latest` link) to the data folder."""
    for session in sorted((run_folder / "r").glob("session_2*")):
        target = log_folder / f"ray-{session.name}"
        if (session / "logs").is_dir() and not target.exists():
            shutil.move(session / "logs", target)
    kept = sorted(log_folder.glob("ray-session_*"))
    for old in kept[:-KEPT_LOG_FOLDERS]:
        shutil.rmtree(old, ignore_errors=True)
