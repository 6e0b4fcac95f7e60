"""Shared by all tests: one thread for torch, so that tests do not fight for the two cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden"

# Compiled functions take seconds at their first call, and no test is about time.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder of the checkpoints with known logits and greedy tokens."""
    return GOLDEN
