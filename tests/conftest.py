"""Shared by all tests: one thread for torch, so that tests do not fight for the two cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the checkpoints with known logits and greedy tokens."""
    return GOLDEN
