"""House rules about size: no file over 500 lines, no function over 60, configs of 12 fields.

Prints each breach as `path:line: message` and exits with 1 when there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CONFIG_FIELDS = 12
PACKAGES = ("configs", "model", "router", "actors", "cluster", "dashboards", "tools", "benchmarks")


def find_breaches(root: Path) -> Iterator[str]:
    """Yield one line per breach in the packages below `root`."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if "generated" not in path.parts:
                yield from _breaches_of(path, path.relative_to(root))


def _breaches_of(path: Path, name: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8")
    num_lines = text.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{name}:1: {num_lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _body_lines(node)
            if length > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most 60"
        elif isinstance(node, ast.ClassDef) and str(name) == "configs/schema.py":
            num_fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
            if num_fields > MAX_CONFIG_FIELDS:
                yield f"{name}:{node.lineno}: {node.name} has {num_fields} fields, at most 12"


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring: contracts may be long."""
    body = node.body
    first = body[1] if len(body) > 1 and ast.get_docstring(node) else body[0]
    return (node.end_lineno or first.lineno) - first.lineno + 1


def main() -> int:
    """Check the repository that this file lies in."""
    breaches = list(find_breaches(Path(__file__).resolve().parent.parent))
    for breach in breaches:
        sys.stdout.write(breach + "\n")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
