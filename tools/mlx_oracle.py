"""Logits and greedy tokens of a K3 checkpoint from mlx-lm on the CPU.

Runs in an environment of its own (`pip install 'mlx[cpu]' mlx-lm`); shares no code with Latentmesh.

    mlx_oracle.py CHECKPOINT OUT.npz --tokens 1,2,3 [--greedy N]
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import kimi_k3


def load_model(folder: Path) -> kimi_k3.Model:
    """Load a checkpoint in float32; packed experts stay packed."""
    config = json.loads((folder / "config.json").read_text())
    model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(config))
    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights.update(mx.load(str(path)))
    weights = model.sanitize(weights)
    if any(name.endswith(".scales") for name in weights):
        nn.quantize(
            model,
            group_size=32,
            bits=4,
            mode="mxfp4",
            class_predicate=lambda path, _: f"{path}.scales" in weights,
        )
    whole = (mx.uint8, mx.uint32)
    model.load_weights(
        [(k, v if v.dtype in whole else v.astype(mx.float32)) for k, v in weights.items()],
        strict=True,
    )
    model.eval()
    return model


def main() -> None:
    """Write tokens, logits and greedy continuation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--greedy", type=int, default=0)
    args = parser.parse_args()
    tokens = [int(token) for token in args.tokens.split(",")]
    model = load_model(args.checkpoint)
    logits = model(mx.array([tokens]))[0].astype(mx.float32)
    greedy = []
    cache = model.make_cache()
    last = model(mx.array([tokens]), cache=cache)
    for _ in range(args.greedy):
        greedy.append(int(mx.argmax(last[0, -1])))
        last = model(mx.array([greedy[-1:]]), cache=cache)
    np.savez_compressed(
        args.output, tokens=np.array(tokens), logits=np.array(logits), greedy=np.array(greedy)
    )


if __name__ == "__main__":
    main()
