"""Copies inside the memory of the model."""

from __future__ import annotations

import pytest
import torch

from model.cache import ModelMemory


@pytest.fixture
def memory() -> ModelMemory:
    generator = torch.Generator().manual_seed(0)
    return ModelMemory(
        kv_MNPC=torch.randn(2, 3, 4, 5, generator=generator).to(torch.bfloat16),
        state_ASHDD=torch.randn(2, 3, 2, 4, 4, generator=generator),
        conv_ASJ3HD=torch.randn(2, 3, 3, 24, generator=generator).to(torch.bfloat16),
    )


def test_a_copied_slot_has_equal_bits_and_the_others_are_left_alone(memory: ModelMemory) -> None:
    memory.state_ASHDD[0, 0, 0, 0, 0] = -0.0
    states, convs = memory.state_ASHDD.clone(), memory.conv_ASJ3HD.clone()
    memory.copy_slot(0, 2)
    assert torch.equal(memory.state_ASHDD[:, 2].view(torch.int32), states[:, 0].view(torch.int32))
    assert torch.equal(memory.conv_ASJ3HD[:, 2].view(torch.int16), convs[:, 0].view(torch.int16))
    assert torch.equal(memory.state_ASHDD[:, :2], states[:, :2])
    assert torch.equal(memory.conv_ASJ3HD[:, :2], convs[:, :2])


def test_the_first_tokens_of_a_block_are_copied_in_every_layer(memory: ModelMemory) -> None:
    before = memory.kv_MNPC.clone()
    memory.copy_block(0, 2, 3)
    assert torch.equal(
        memory.kv_MNPC[:, 2, :3].view(torch.int16), before[:, 0, :3].view(torch.int16)
    )
    assert torch.equal(memory.kv_MNPC[:, 2, 3:], before[:, 2, 3:])
    assert torch.equal(memory.kv_MNPC[:, :2], before[:, :2])
