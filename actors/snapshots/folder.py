"""Copies of requests in a folder, which several workers of several machines may share."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Final

from actors.snapshots.codec import SnapshotBytes
from actors.snapshots.names import check_name, missing
from configs.errors import SnapshotError

_SUFFIX: Final = ".snapshot"
_PART_SUFFIX: Final = ".part"
PART_AGE_S: Final = 3600.0
"""A file that is being written for so long is a leftover, whoever wrote it."""
_part_numbers = itertools.count(1)


class FolderVault:
    """Holds at most about `max_bytes`; the oldest files make room. From any thread or process.

    Writers in other processes may go over the limit by what they are just writing. How long the
    calls take is the file system's business.
    """

    def __init__(self, path: Path | str, *, max_bytes: int) -> None:
        """Touch nothing yet; the first `save` makes the folder and sweeps it."""
        self.path = Path(path)
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._is_swept = False

    def save(self, name: str, data: SnapshotBytes) -> None:
        """Store a copy in place of one of the same name: readers see all of it or nothing.

        Raises:
            SnapshotError: The name cannot be one, the copy is larger than the limit, or the folder
                cannot be written.
        """
        check_name(name)
        if len(data) > self.max_bytes:
            raise SnapshotError(
                f"snapshot of {len(data)} bytes exceeds the limit of {self.max_bytes} bytes for "
                f"{self.path}; raise the limit"
            )
        target = self._file(name)
        part = self.path / f"{_host()}-{os.getpid()}-{next(_part_numbers)}{_PART_SUFFIX}"
        with self._lock:
            try:
                self._prepare()
                self._make_room(self.max_bytes - len(data), keep=target)
                try:
                    part.write_bytes(data)
                    part.replace(target)
                finally:
                    part.unlink(missing_ok=True)
            except (OSError, ValueError) as exc:  # ValueError: a path that no file system has.
                raise SnapshotError(f"cannot write snapshot {target}: {exc}") from exc

    def load(self, name: str, *, num_bytes: int) -> bytes:
        """Return a copy of `num_bytes` bytes.

        Raises:
            SnapshotError: It is not there, cannot be read, or has another size.
        """
        check_name(name)
        try:
            with self._file(name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != num_bytes:
                    raise SnapshotError(
                        f"snapshot {name} has {size:,} bytes, {num_bytes:,} expected; "
                        "compute the request again"
                    )
                return file.read(size)
        except FileNotFoundError as exc:
            raise missing(name, str(self.path)) from exc
        except (OSError, ValueError) as exc:  # ValueError: a path that no file system has.
            raise SnapshotError(f"cannot read snapshot {self._file(name)}: {exc}") from exc

    def drop(self, name: str) -> None:
        """Remove a copy; one that is not there is as good.

        Raises:
            SnapshotError: The name cannot be one, or the file cannot be removed.
        """
        check_name(name)
        try:
            self._file(name).unlink(missing_ok=True)
        except (OSError, ValueError) as exc:
            raise SnapshotError(f"cannot remove snapshot {self._file(name)}: {exc}") from exc

    def _file(self, name: str) -> Path:
        # With a suffix no name is one of the folder's own: "." and "..".
        return self.path / f"{name}{_SUFFIX}"

    def _prepare(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._is_swept:
            for part in self.path.glob(f"*{_PART_SUFFIX}"):
                if _is_leftover(part):
                    part.unlink(missing_ok=True)
            self._is_swept = True

    def _make_room(self, max_bytes: int, *, keep: Path) -> None:
        """Remove the oldest files until the others but `keep` have at most `max_bytes`."""
        files = []
        for file in self.path.glob(f"*{_SUFFIX}"):
            try:
                stat = file.stat()
            except FileNotFoundError:  # Another process removed it.
                continue
            if file != keep:
                files.append((stat.st_mtime_ns, stat.st_size, file))
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= max_bytes:
                return
            file.unlink(missing_ok=True)
            total -= size


def _host() -> str:
    return re.sub(r"[^a-zA-Z0-9.]", "_", socket.gethostname())[:64]


def _is_leftover(part: Path) -> bool:
    """Whether who writes a file is dead, as far as can be known from here."""
    match = re.fullmatch(r"(.*)-(\d{1,9})-\d+", part.name.removesuffix(_PART_SUFFIX))
    if match is not None and match[1] == _host() and not _is_alive(int(match[2])):
        return True
    try:
        return time.time() - part.stat().st_mtime > PART_AGE_S
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
