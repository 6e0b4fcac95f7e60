"""The top-level names are ours, and the floors exist."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["configs", "model", "router", "actors", "cluster", "dashboards"])
def test_package_of_that_name_is_ours(name: str) -> None:
    assert Path(importlib.import_module(name).__file__) == ROOT / name / "__init__.py"
    assert (ROOT / name / "py.typed").exists()


def test_every_requirement_of_the_project_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name in ("torch==2.13.0", "ray==", "grpcio==", "redis==", "opentelemetry-sdk=="):
        assert f"\n{name}" in pins
