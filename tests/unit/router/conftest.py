"""Shared by tests of the router."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets, which pytest's own need not be."""
    with tempfile.TemporaryDirectory(prefix="lm") as name:
        yield Path(name)
