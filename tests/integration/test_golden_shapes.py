"""Logits and greedy tokens of shapes beyond the golden checkpoints, against mlx-lm's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from actors.single_process import SingleProcess, SingleProcessSettings
from model.checkpoint import Checkpoint
from model.checkpoint_writer import write_checkpoint

ROOT = Path(__file__).parents[2]


def _load(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHAPES = _load("golden_shapes", ROOT / "tests" / "golden_shapes.py")
TOOL = _load("make_golden_shapes", ROOT / "tools" / "make_golden_shapes.py")
TOLERANCE = {"33-packed-experts": 5e-3}


@pytest.mark.parametrize("name", sorted(SHAPES.SHAPES))
def test_logits_and_greedy_tokens_equal_the_independent_ones(
    name: str, tmp_path: Path, golden_dir: Path
) -> None:
    golden = np.load(golden_dir / "shapes" / f"{name}.npz")
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, SHAPES.SHAPES[name], seed=SHAPES.SEED)
    assert TOOL.weights_digest(folder) == str(golden["digest"]), (
        "the writer makes other weights now; run tools/make_golden_shapes.py again"
    )
    tokens = [int(token) for token in golden["tokens"]]
    with SingleProcess(Checkpoint.open(folder), SingleProcessSettings()) as process:
        logits = process.score(tokens)
        answer = process.generate(tokens, max_tokens=SHAPES.NUM_GREEDY, stop_token_ids=[])
    assert np.abs(logits - golden["logits"]).max() < TOLERANCE.get(name, 1e-3)
    assert list(answer.token_ids) == [int(token) for token in golden["greedy"]]
