#!/usr/bin/env bash
# The static checks, in one place: `make check` and .ci/run call this.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN="${BIN:-.venv/bin}"
"$BIN/ruff" format --check --quiet .
"$BIN/ruff" check --quiet .
"$BIN/lint-imports" --no-cache > /tmp/lint-imports.$$ 2>&1 || { cat /tmp/lint-imports.$$; rm -f /tmp/lint-imports.$$; exit 1; }
rm -f /tmp/lint-imports.$$
"$BIN/mypy"
"$BIN/python" tools/check_sizes.py
"$BIN/codespell" --skip '*.pyi,*_pb2*.py,./constraints.txt,./.venv,./.git,*.json,*.model,./latentmesh-data,./demo-data' .
echo "static checks passed"
