"""Keys in a JSON file: written atomically, readable by its owner, reread when it changes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.api.access.keys import KeyId, KeyRecord
from configs.errors import ConfigError, StateStoreError


@dataclass(frozen=True, slots=True)
class _Content:
    """What the file holds."""

    keys: list[KeyRecord]


@dataclass(frozen=True, slots=True)
class _Version:
    """Tells one state of the file from another. A replaced file has another inode."""

    inode: int
    size: int
    changed_ns: int


class KeyFile:
    """A file of key records. A file that cannot be read refuses every key."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: _Version | None = None
        self._records: dict[KeyId, KeyRecord] = {}

    def check(self) -> None:
        """Read the file once.

        Raises:
            ConfigError: It is missing, damaged or writable by others.
        """
        try:
            self._refresh()
        except StateStoreError as exc:
            raise ConfigError(f"api.auth.key_file: {exc.message}") from exc

    async def find(self, key: KeyId) -> KeyRecord | None:
        """See `KeyStore`."""
        await asyncio.to_thread(self._refresh)
        return self._records.get(key)

    async def read_all(self) -> tuple[KeyRecord, ...]:
        """See `KeyStore`."""
        await asyncio.to_thread(self._refresh)
        return tuple(self._records.values())

    async def put(self, record: KeyRecord) -> None:
        """See `KeyStore`. Makes the file where there is none."""
        await asyncio.to_thread(self._put, record)

    async def close(self) -> None:
        """See `KeyStore`."""

    def _refresh(self) -> None:
        try:
            state = self._path.stat()
            version = _Version(state.st_ino, state.st_size, state.st_mtime_ns)
            if version == self._version:
                return
            if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise StateStoreError(
                    f"key file {self._path} may be written by others (mode "
                    f"{stat.S_IMODE(state.st_mode):04o}), who could add keys; chmod 600 it"
                )
            self._records = _parse(self._path.read_bytes(), self._path)
        except FileNotFoundError as exc:
            raise StateStoreError(
                f"there is no key file {self._path}; make a first key with "
                f"`latentmesh keys create NAME --key-file {self._path}`"
            ) from exc
        except OSError as exc:
            raise StateStoreError(f"key file {self._path} cannot be read: {exc.strerror}") from exc
        self._version = version

    def _put(self, record: KeyRecord) -> None:
        try:
            with _locked(self._path):
                if self._path.exists():
                    self._refresh()
                records = {**self._records, record.id: record}
                _write(self._path, list(records.values()))
        except OSError as exc:
            raise StateStoreError(
                f"key file {self._path} cannot be written: {exc.strerror}"
            ) from exc


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep two commands from losing each other's key. The lock file stays."""
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _parse(data: bytes, path: Path) -> dict[KeyId, KeyRecord]:
    try:
        content = msgspec.json.decode(data, type=_Content)
    except msgspec.MsgspecError as exc:
        raise StateStoreError(f"{path} is no key file of this version: {exc}") from exc
    return {record.id: record for record in content.keys}


def _write(path: Path, records: list[KeyRecord]) -> None:
    data = msgspec.json.format(msgspec.json.encode(_Content(records)), indent=2)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
