from __future__ import annotations

from pathlib import Path

import pytest

from configs.loading import load_config
from configs.resolve import Facts, resolve

PRESETS = sorted((Path(__file__).parents[3] / "configs" / "presets").glob("*.yaml"))
FACTS = Facts(
    num_cores=2,
    available_memory_bytes=8 << 30,
    has_cuda=False,
    attention_side_bytes=10 << 20,
    expert_bytes=20 << 10,
    num_experts=16,
    num_moe_layers=8,
    num_experts_per_token=4,
    bytes_per_block=64 << 10,
    bytes_per_slot=128 << 10,
    model_context_tokens=4096,
)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_preset_loads_and_resolves(preset: Path) -> None:
    assert resolve(load_config(preset), FACTS).num_blocks >= 64
