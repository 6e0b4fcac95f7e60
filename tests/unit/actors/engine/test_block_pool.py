"""The pool of cache blocks."""

from __future__ import annotations

import pytest

from actors.engine.block_pool import BlockPool
from configs.errors import InvariantError, OverloadedError


def test_blocks_in_use_are_distinct_and_counted() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(5)
    assert sorted(first + second) == list(range(8))
    assert (pool.num_free, pool.num_used, pool.num_blocks) == (0, 8, 8)
    pool.check()


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OverloadedError, match="2 cache blocks asked for, 1 of 4"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_freed_blocks_can_be_handed_out_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.free(blocks)
    assert set(pool.allocate(2)) == set(blocks)


def test_a_shared_block_is_free_when_its_last_user_lets_go() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    assert (pool.num_used, pool.num_free) == (2, 1)
    pool.free(blocks)
    assert (pool.num_used, pool.num_free) == (1, 2)
    pool.check()
    pool.free(blocks[:1])
    assert (pool.num_used, pool.num_free) == (0, 3)
    pool.check()


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    with pytest.raises(InvariantError, match="shared but not in use"):
        pool.share([block, 1 - block])
    pool.free([block])
    assert pool.num_used == 0


def test_no_blocks_are_a_valid_allocation() -> None:
    pool = BlockPool(1)
    assert pool.allocate(0) == ()
    pool.free(())
    assert pool.num_free == 1


@pytest.mark.parametrize(
    "blocks", [[0], [-1], [4], [1, 0], [1, 1]], ids=["free", "negative", "unknown", "one", "twice"]
)
def test_freeing_what_is_not_in_use_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(4)
    used = pool.allocate(2)
    assert used == (0, 1)
    pool.free([0])
    with pytest.raises(InvariantError):
        pool.free(blocks)
    assert pool.num_used == 1
    pool.check()
