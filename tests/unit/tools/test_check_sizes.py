from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "check_sizes.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sizes", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_long_file_function_and_config_are_found(tool: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "model/a.py", "x = 1\n" * 501)
    write(tmp_path, "model/b.py", "def f():\n" + "    x = 1\n" * 61)
    fields = "".join(f"    f{i}: int = 0\n" for i in range(13))
    write(tmp_path, "configs/schema.py", "class C:\n" + fields)
    found = list(tool.find_breaches(tmp_path))
    assert [breach.split(":")[0] for breach in found] == [
        "configs/schema.py", "model/a.py", "model/b.py",
    ]  # fmt: skip


def test_docstring_does_not_count_as_function_length(tool: ModuleType, tmp_path: Path) -> None:
    doc = '    """Doc.\n' + "    line\n" * 80 + '    """\n'
    write(tmp_path, "model/b.py", "def f():\n" + doc + "    return 1\n")
    assert list(tool.find_breaches(tmp_path)) == []
