"""Files that follow from other files are current."""

from __future__ import annotations

import filecmp
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_proto_code_is_current(tmp_path: Path) -> None:
    subprocess.run(
        ["bash", str(ROOT / "tools" / "generate_proto.sh"), str(tmp_path)],
        check=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    committed = ROOT / "cluster" / "api" / "generated"
    assert len(made) >= 4
    _, differing, missing = filecmp.cmpfiles(tmp_path, committed, made, shallow=False)
    assert (differing, missing) == ([], [])


PAGES = load_tool("make_docs").make_pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_reference_page_is_what_the_code_says(name: str) -> None:
    committed = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert committed == PAGES[name], "run tools/make_docs.py"
