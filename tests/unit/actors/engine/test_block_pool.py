"""The pool of cache blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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


def test_a_held_block_is_cached_when_its_users_are_gone() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.hold(blocks[:1])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 1)
    pool.free(blocks)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 1, 2)
    pool.release(blocks[:1])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 0, 3)


def test_a_cached_block_can_be_used_again() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.hold(blocks)
    pool.free(blocks)
    pool.share(blocks)
    assert (pool.num_used, pool.num_cached) == (1, 0)
    pool.release(blocks)
    assert (pool.num_used, pool.num_free) == (1, 0)
    pool.check()


@pytest.mark.parametrize(
    "blocks",
    [[1, 0], [1, 2], [-1], [3], [1, 1]],
    ids=["one", "free", "negative", "unknown", "twice"],
)
def test_releasing_what_is_not_held_changes_nothing(blocks: list[int]) -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.hold([1])
    with pytest.raises(InvariantError):
        pool.release(blocks)
    pool.free([0, 1])
    assert (pool.num_cached, pool.num_free) == (1, 2)
    pool.check()


def test_a_free_block_cannot_be_held() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    with pytest.raises(InvariantError, match="held but not in use"):
        pool.hold([block, 1 - block])
    pool.free([block])
    assert pool.num_free == 2


class BlockPoolStory(RuleBasedStateMachine):
    """Requests that share prefixes, and snapshots that hold them, beside a count per block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.requests: list[tuple[int, ...]] = []
        self.holds: list[tuple[int, ...]] = []

    @rule(num_blocks=st.integers(0, 9))
    def begin(self, num_blocks: int) -> None:
        free = self.pool.num_free
        if num_blocks > free:
            with pytest.raises(OverloadedError):
                self.pool.allocate(num_blocks)
            assert self.pool.num_free == free
        else:
            self.requests.append(self.pool.allocate(num_blocks))

    @precondition(lambda self: self.requests or self.holds)
    @rule(data=st.data(), num_own=st.integers(0, 2))
    def begin_at_a_prefix(self, data, num_own: int) -> None:
        whole = data.draw(st.sampled_from(self.requests + self.holds))
        shared = whole[: data.draw(st.integers(0, len(whole)))]
        if num_own <= self.pool.num_free:
            self.pool.share(shared)
            self.requests.append(shared + self.pool.allocate(num_own))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data) -> None:
        index = data.draw(st.integers(0, len(self.requests) - 1))
        self.pool.free(self.requests.pop(index))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def hold(self, data) -> None:
        whole = data.draw(st.sampled_from(self.requests))
        held = whole[: data.draw(st.integers(0, len(whole)))]
        self.pool.hold(held)
        self.holds.append(held)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data) -> None:
        index = data.draw(st.integers(0, len(self.holds) - 1))
        self.pool.release(self.holds.pop(index))

    @invariant()
    def counts_are_those_of_the_twin(self) -> None:
        used = Counter(block for blocks in self.requests for block in blocks)
        held = {block for blocks in self.holds for block in blocks}
        pool = self.pool
        pool.check()
        assert (pool.num_used, pool.num_cached) == (len(used), len(held - used.keys()))
        assert pool.num_free + pool.num_used + pool.num_cached == pool.num_blocks
        for blocks in self.requests:
            assert pool.count_private(blocks) == sum(used[block] == 1 for block in blocks)
        every = range(pool.num_blocks)
        assert pool.count_cached(list(every)) == sum(block not in used for block in every)
        assert pool.count_unheld(list(every)) == sum(block not in held for block in every)


BlockPoolStory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlockPoolStory = BlockPoolStory.TestCase
