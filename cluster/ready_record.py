"""The ready file: where a running cluster is reached. There only while requests can be served."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from configs.errors import ConfigError
from configs.ids import ClusterId


@dataclass(frozen=True, slots=True)
class ReadyRecord:
    """Addresses of a cluster, and what it serves."""

    cluster_id: ClusterId
    grpc: str
    """`host:port`."""
    http: str
    """`host:port`."""
    dashboard: str | None
    """URL of the Ray dashboard, if there is one."""
    pid: int
    """Process of the launch."""
    data_dir: str
    model: str
    """Name that requests may use."""


def write_record(record: ReadyRecord, paths: Sequence[Path]) -> None:
    """Write a record to every path; a reader sees all of it or nothing.

    Raises:
        ConfigError: A path cannot be written.
    """
    text = json.dumps(asdict(record), indent=2) + "\n"
    for path in paths:
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as exc:
            raise ConfigError(f"ready file {path} cannot be written: {exc.strerror}") from exc


def read_record(path: Path) -> ReadyRecord:
    """Read a record.

    Raises:
        ConfigError: There is none (no cluster serves), or it is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return ReadyRecord(**{field.name: values[field.name] for field in fields(ReadyRecord)})
    except FileNotFoundError as exc:
        raise ConfigError(
            f"no cluster serves from data folder {path.parent}; start one with `latentmesh serve`, "
            f"or give --data-dir or --server HOST:PORT"
        ) from exc
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"{path} is no ready file: {exc}") from exc


def remove_record(paths: Sequence[Path]) -> None:
    """Delete the files. Idempotent."""
    for path in paths:
        path.unlink(missing_ok=True)
