#!/usr/bin/env bash
# Rewrite constraints.txt from the environment that the tests just passed in.
set -euo pipefail
cd "$(dirname "$0")/.."
{
  echo "# Exact versions that the tests pass with. Written by tools/pin.sh."
  echo "# torch stays at the CPU build of this version; another one pulls gigabytes of CUDA."
  .venv/bin/pip freeze --exclude-editable | grep -v ' @ ' | sed 's/^torch==.*/torch==2.13.0/'
} > constraints.txt
