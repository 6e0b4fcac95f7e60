"""Which prefixes are kept, found and given up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.block_pool import BlockPool
from actors.engine.prefix_index import PrefixIndex
from actors.prefix_chain import chain_keys
from model.cache import SlotCopy

SLOT_BYTES = 24
BLOCK_TOKENS = 4


def slot(num_floats: int = 3) -> SlotCopy:
    return SlotCopy(torch.zeros(num_floats), torch.zeros(3))


class Rig:
    """An index over a pool, and requests that come, leave a snapshot and go."""

    def __init__(self, *, num_blocks: int = 64, max_bytes: int = 10_000) -> None:
        self.pool = BlockPool(num_blocks)
        self.index = PrefixIndex(
            self.pool, block_tokens=BLOCK_TOKENS, block_bytes=8, max_bytes=max_bytes
        )

    def leave(self, tokens: list[int], copy: SlotCopy | None = None) -> bool:
        blocks = self.pool.allocate(-(-len(tokens) // BLOCK_TOKENS))
        was_kept = self.index.insert(array(tokens), blocks, slot() if copy is None else copy)
        self.pool.free(blocks)
        self.pool.check()
        return was_kept

    def found(self, tokens: list[int], limit: int | None = None) -> int:
        hit = self.index.match(array(tokens), len(tokens) if limit is None else limit)
        return 0 if hit is None else hit.position


def array(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


prompts = st.lists(st.integers(0, 1), max_size=14)


@given(st.lists(prompts, max_size=12), st.lists(st.tuples(prompts, st.integers(0, 16))))
def test_a_hit_is_the_longest_kept_prefix_within_the_limit(kept, asked) -> None:
    rig = Rig(num_blocks=200)
    for tokens in kept:
        rig.leave(tokens)
    twin = {tuple(tokens) for tokens in kept if tokens}
    assert len(rig.index) == len(twin)
    for tokens, limit in asked:
        fitting = [one for one in twin if len(one) <= limit and tuple(tokens[: len(one)]) == one]
        assert rig.found(tokens, limit) == max(map(len, fitting), default=0)


actions = st.one_of(
    st.tuples(st.just("leave"), prompts),
    st.tuples(st.just("bytes"), st.integers(0, 200)),
    st.tuples(st.just("blocks"), st.integers(0, 12)),
    st.tuples(st.just("reserve"), st.integers(0, 100)),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("news"), st.none()),
)


@settings(max_examples=150)
@given(st.lists(actions, max_size=40))
def test_budget_blocks_and_news_are_right_after_anything(story) -> None:
    rig = Rig(num_blocks=12, max_bytes=6 * SLOT_BYTES)
    index, known = rig.index, set()
    for what, value in story:
        version, kept = index.version, set(index._snapshots)
        if what == "leave":
            if -(-len(value) // BLOCK_TOKENS) > rig.pool.num_free:
                index.evict_for_blocks(-(-len(value) // BLOCK_TOKENS))
            rig.leave(value)
        elif what == "bytes":
            index.evict_for_bytes(value)
        elif what == "blocks":
            index.evict_for_blocks(value)
            assert rig.pool.num_free >= value
        elif what == "reserve":
            index.reserved_bytes = value
            index.evict_for_bytes(0)
        elif what == "flush":
            assert index.flush() == len(kept)
            assert (len(index), rig.pool.num_free, index.num_bytes) == (0, 12, 0)
        else:
            news = index.take_news()
            if news is not None:
                assert not set(news.added) & set(news.removed)
                assert not set(news.added) & known
                assert set(news.removed) <= known
                known = (known | set(news.added)) - set(news.removed)
            assert known == set(index.keys())
            assert index.take_news() is None
        rig.pool.check()
        assert rig.pool.num_used == 0
        assert index.num_bytes == SLOT_BYTES * len(index)
        assert index.num_bytes + index.reserved_bytes <= max(6 * SLOT_BYTES, index.reserved_bytes)
        assert (index.version != version) >= (set(index._snapshots) != kept)
        held = {block for one in index._snapshots.values() for block in one.blocks}
        assert rig.pool.num_cached == len(held)
    index.flush()
    assert len(index._nodes) == 1  # Nothing leads anywhere any more.


def test_nothing_is_kept_without_a_budget() -> None:
    rig = Rig(max_bytes=0)
    assert not rig.leave([1, 2, 3, 4])
    assert not rig.index.is_enabled
    assert (len(rig.index), rig.pool.num_free) == (0, 64)


def test_a_snapshot_larger_than_the_budget_costs_no_other() -> None:
    rig = Rig(max_bytes=3 * SLOT_BYTES)
    rig.leave([1] * 4)
    assert not rig.leave([2] * 4, slot(100))
    assert rig.found([1] * 4) == 4


@pytest.mark.parametrize(("reserved", "expected"), [(SLOT_BYTES, True), (SLOT_BYTES + 1, False)])
def test_copies_of_other_kinds_take_part_of_the_budget(reserved: int, expected: bool) -> None:
    rig = Rig(max_bytes=2 * SLOT_BYTES)
    rig.index.reserved_bytes = reserved
    assert rig.leave([1] * 4) == expected
    assert rig.index.room_bytes == 2 * SLOT_BYTES - reserved


def test_the_same_prefix_is_kept_once() -> None:
    rig = Rig()
    assert rig.leave([1] * 6)
    assert not rig.leave([1] * 6)
    assert (len(rig.index), rig.pool.num_cached) == (1, 2)


def test_the_block_after_the_last_whole_one_stays_too() -> None:
    rig = Rig()
    rig.leave([1] * 6)
    hit = rig.index.match(array([1] * 6), 6)
    assert hit is not None
    assert len(hit.blocks) == 2


def test_tokens_that_differ_within_the_last_block_are_no_hit() -> None:
    rig = Rig()
    rig.leave([1, 1, 1, 1, 2, 3])
    assert rig.found([1, 1, 1, 1, 2, 4]) == 0
    assert rig.found([1, 1, 1, 1, 2, 3, 9]) == 6


def test_what_saves_least_per_byte_is_given_up_first() -> None:
    rig = Rig(max_bytes=3 * SLOT_BYTES)
    for length, token in ((12, 1), (4, 2), (8, 3)):
        rig.leave([token] * length)
    rig.leave([4] * 12)
    assert [rig.found([token] * 12) for token in (1, 2, 3, 4)] == [12, 0, 8, 12]
    assert rig.index.num_evicted == 1


def test_a_snapshot_is_worth_only_what_it_adds_to_a_shorter_one() -> None:
    rig = Rig(max_bytes=3 * SLOT_BYTES)
    rig.leave([1] * 12)
    rig.leave([1] * 13)
    rig.leave([2] * 8)
    rig.leave([3] * 8)
    assert (rig.found([1] * 13), rig.found([2] * 8), rig.found([3] * 8)) == (12, 8, 8)


def test_age_beats_worth_in_the_end() -> None:
    rig = Rig(max_bytes=2 * SLOT_BYTES)
    rig.leave([1] * 14)
    for token in range(2, 30):
        rig.leave([token] * 4)
    assert rig.found([1] * 14) == 0


def test_one_that_is_used_outlives_its_like() -> None:
    rig = Rig(max_bytes=2 * SLOT_BYTES)
    rig.leave([1] * 8)
    for token in range(2, 30):
        hit = rig.index.match(array([1] * 8), 8)
        assert hit is not None
        rig.index.touch(hit)
        rig.leave([token] * 8)
    assert rig.found([1] * 8) == 8


def test_blocks_that_a_request_uses_outlive_the_snapshot() -> None:
    rig = Rig()
    blocks = rig.pool.allocate(2)
    rig.index.insert(array([1] * 8), blocks, slot())
    rig.index.flush()
    assert rig.pool.num_used == 2
    rig.pool.free(blocks)
    assert rig.pool.num_free == 64


def test_keys_are_those_that_a_gateway_computes() -> None:
    rig = Rig()
    rig.leave([1, 2, 3])
    rig.leave([1, 2, 3, 4, 5])
    rig.leave([1, 2, 3, 4, 5, 6, 7, 8])
    assert set(rig.index.keys()) == set(chain_keys([1, 2, 3, 4, 5, 6, 7, 8], BLOCK_TOKENS))


def test_a_key_that_goes_and_comes_back_is_no_news() -> None:
    rig = Rig()
    rig.leave([1] * 4)
    rig.index.take_news()
    rig.index.flush()
    rig.leave([1] * 4)
    assert rig.index.take_news() is None


def test_looking_changes_nothing() -> None:
    rig = Rig()
    rig.leave([1] * 4)
    version = rig.index.version
    rig.found([1] * 9)
    assert rig.index.version == version
