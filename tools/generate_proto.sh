#!/usr/bin/env bash
# Regenerate the Python code of proto/ into cluster/api/generated. A test checks that it is current.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
out="${1:-cluster/api/generated}"
mkdir -p "$out"
"$python" -m grpc_tools.protoc -Iproto --python_out="$out" --grpc_python_out="$out" --pyi_out="$out" \
  proto/latentmesh/v1/inference.proto proto/latentmesh/v1/fabric.proto
# protoc writes imports relative to the proto root; ours live below cluster.api.generated.
sed -i 's/^from latentmesh\.v1 import/from cluster.api.generated.latentmesh.v1 import/' \
  "$out"/latentmesh/v1/*_pb2_grpc.py
touch "$out/__init__.py" "$out/latentmesh/__init__.py" "$out/latentmesh/v1/__init__.py"
