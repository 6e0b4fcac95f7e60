"""Progress bars for long work, on standard error and only on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)


class ByteProgress:
    """Fulfils `model.checkpoint.Progress` with a rich bar."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def advance(self, num_bytes: int) -> None:
        """Move the bar."""
        self._progress.advance(self._task, num_bytes)


@contextmanager
def byte_progress(label: str, total_bytes: int) -> Iterator[ByteProgress]:
    """Show a bar of `total_bytes` while the block runs; silent when nobody watches."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield ByteProgress(progress, progress.add_task(label, total=total_bytes))
