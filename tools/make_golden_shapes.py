"""Compute logits and greedy tokens of `tests/golden_shapes.py` with mlx-lm, an independent K3.

    python -m venv mlx && mlx/bin/pip install 'mlx[cpu]' mlx-lm
    .venv/bin/python tools/make_golden_shapes.py --mlx-python mlx/bin/python

Run again only when shapes or the checkpoint writer change; the files go to `tests/golden/shapes`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from model.checkpoint_writer import write_checkpoint  # noqa: E402 - after the path is set
from tests.golden_shapes import NUM_GREEDY, NUM_PROMPT, SEED, SHAPES  # noqa: E402 - likewise

ORACLE = ROOT / "tools" / "mlx_oracle.py"


def main() -> None:
    """Write one `.npz` per shape: tokens, logits, greedy, and the digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mlx-python", required=True, help="python with mlx[cpu] and mlx-lm")
    python = parser.parse_args().mlx_python
    target = ROOT / "tests" / "golden" / "shapes"
    target.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    for name, spec in SHAPES.items():
        tokens = rng.integers(0, spec.dims.vocab_size, NUM_PROMPT)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "checkpoint"
            write_checkpoint(folder, spec, seed=SEED)
            output = Path(scratch) / "out.npz"
            words = [python, str(ORACLE), str(folder), str(output)]
            words += ["--tokens", ",".join(map(str, tokens)), "--greedy", str(NUM_GREEDY)]
            subprocess.run(words, check=True)  # noqa: S603 - our own script
            oracle = dict(np.load(output))
            np.savez_compressed(target / f"{name}.npz", digest=weights_digest(folder), **oracle)


def weights_digest(folder: Path) -> str:
    """SHA-256 of all weight files, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
