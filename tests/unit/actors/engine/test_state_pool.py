"""The pool of state slots."""

from __future__ import annotations

import pytest

from actors.engine.state_pool import StatePool
from configs.errors import InvariantError, OverloadedError
from tests.fakes.fake_decoder import fake_memory


def test_a_slot_is_zero_when_it_is_handed_out() -> None:
    memory = fake_memory(num_blocks=1, block_size=16, num_slots=2)
    pool = StatePool(memory)
    slot = pool.allocate()
    other = 1 - slot
    assert memory.state_ASHDD[:, slot].abs().sum() == 0
    assert memory.conv_ASJ3HD[:, slot].abs().sum() == 0
    assert memory.state_ASHDD[:, other].abs().sum() > 0


def test_a_slot_is_zeroed_again_for_its_next_owner() -> None:
    memory = fake_memory(num_blocks=1, block_size=16, num_slots=1)
    pool = StatePool(memory)
    slot = pool.allocate()
    memory.state_ASHDD[:, slot] = 5.0
    pool.free(slot)
    assert pool.allocate() == slot
    assert memory.state_ASHDD[:, slot].abs().sum() == 0


def test_slots_are_counted_and_run_out() -> None:
    pool = StatePool(fake_memory(num_blocks=1, block_size=16, num_slots=2))
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert (pool.num_free, pool.num_used, pool.num_slots) == (0, 2, 2)
    with pytest.raises(OverloadedError, match="all 2 state slots"):
        pool.allocate()
    pool.check()


@pytest.mark.parametrize("slot", [0, -1, 2])
def test_freeing_what_is_not_in_use_is_an_invariant_error(slot: int) -> None:
    pool = StatePool(fake_memory(num_blocks=1, block_size=16, num_slots=2))
    pool.free(pool.allocate())
    with pytest.raises(InvariantError):
        pool.free(slot)
    assert pool.num_free == 2
