import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.prefix_chain import chain_keys
from actors.request_channel import PrefixNews
from cluster.api import prefix_map
from cluster.api.prefix_map import PrefixMap
from configs.ids import WorkerId

A, B = WorkerId("a"), WorkerId("b")


def key_of(token_ids, block_tokens=2):
    """The key of all whole blocks of some tokens."""
    return list(chain_keys(token_ids, block_tokens))[-1]


@pytest.fixture
def prefixes():
    """Two workers of which nothing is known yet."""
    made = PrefixMap()
    made.add_worker(A, 2)
    made.add_worker(B, 2)
    return made


def test_each_worker_has_its_longest_prefix(prefixes):
    prefixes.take(A, PrefixNews(1, [key_of([1, 2]), key_of([1, 2, 3, 4])]))
    prefixes.take(B, PrefixNews(1, [key_of([1, 2])]))
    assert prefixes.longest([1, 2, 3, 4, 5]) == {A: 4, B: 2}


def test_prompt_that_differs_early_finds_nothing(prefixes):
    prefixes.take(A, PrefixNews(1, [key_of([1, 2, 3, 4])]))
    assert prefixes.longest([9, 2, 3, 4]) == {}


def test_a_longer_prefix_is_found_past_links_that_are_not_cached(prefixes):
    prefixes.take(A, PrefixNews(1, [key_of([1, 2, 3, 4, 5, 6])]))
    assert prefixes.longest([1, 2, 3, 4, 5, 6, 7]) == {A: 6}


def test_removed_prefix_is_not_found(prefixes):
    prefixes.take(A, PrefixNews(1, [key_of([1, 2]), key_of([1, 2, 3, 4])]))
    prefixes.take(A, PrefixNews(2, removed=[key_of([1, 2, 3, 4])]))
    assert prefixes.longest([1, 2, 3, 4]) == {A: 2}


@pytest.mark.parametrize("epoch", [5, 7, 4], ids=["again", "one missed", "older"])
def test_news_that_are_not_the_next_drop_what_was_known(prefixes, caplog, epoch):
    prefixes.take(A, PrefixNews(5, [key_of([1, 2])]))
    with caplog.at_level(logging.WARNING):
        prefixes.take(A, PrefixNews(epoch, [key_of([3, 4])]))
    assert "epoch" in caplog.text
    assert prefixes.longest([1, 2]) == {}
    assert prefixes.longest([3, 4]) == {A: 2}


def test_worker_that_is_gone_is_not_named_and_not_heard(prefixes):
    prefixes.take(A, PrefixNews(1, [key_of([1, 2])]))
    prefixes.drop_worker(A)
    prefixes.take(A, PrefixNews(2, [key_of([1, 2])]))
    assert prefixes.longest([1, 2]) == {}
    assert prefixes.num_keys(A) == 0


def test_worker_that_is_back_begins_with_nothing_at_any_epoch(prefixes):
    prefixes.take(A, PrefixNews(8, [key_of([1, 2])]))
    prefixes.add_worker(A, 2)
    assert prefixes.longest([1, 2]) == {}
    prefixes.take(A, PrefixNews(1, [key_of([3, 4])]))
    assert prefixes.longest([3, 4]) == {A: 2}


def test_workers_with_other_block_sizes_are_compared_by_tokens(prefixes):
    prefixes.add_worker(B, 3)
    prefixes.take(A, PrefixNews(1, [key_of([1, 2, 3, 4])]))
    prefixes.take(B, PrefixNews(1, [key_of([1, 2, 3], 3)]))
    assert prefixes.longest([1, 2, 3, 4]) == {A: 4, B: 3}


@pytest.mark.parametrize("block_tokens", [0, -1])
def test_worker_without_blocks_takes_no_part(block_tokens):
    prefixes = PrefixMap()
    prefixes.add_worker(A, block_tokens)
    prefixes.take(A, PrefixNews(1, [b"k"]))
    assert prefixes.longest([1, 2]) == {}


def test_no_more_keys_are_kept_than_the_bound(prefixes, monkeypatch, caplog):
    monkeypatch.setattr(prefix_map, "MAX_KEYS", 3)
    with caplog.at_level(logging.WARNING):
        prefixes.take(A, PrefixNews(1, [bytes([i]) for i in range(5)]))
    assert prefixes.num_keys(A) == 3
    assert "not remembered" in caplog.text


TOKENS = st.lists(st.integers(0, 1), max_size=12)


@settings(deadline=None)
@given(cached=st.lists(TOKENS, max_size=6), prompt=TOKENS, gone=st.sets(st.integers(0, 5)))
def test_found_length_is_that_of_the_longest_cached_prefix(cached, prompt, gone):
    prefixes = PrefixMap()
    prefixes.add_worker(A, 2)
    whole = [tokens[: len(tokens) // 2 * 2] for tokens in cached if len(tokens) >= 2]
    prefixes.take(A, PrefixNews(1, [key_of(tokens) for tokens in whole]))
    removed = [tokens for i, tokens in enumerate(whole) if i in gone]
    prefixes.take(A, PrefixNews(2, removed=[key_of(tokens) for tokens in removed]))
    left = [tokens for tokens in whole if tokens not in removed]
    lengths = [len(tokens) for tokens in left if prompt[: len(tokens)] == tokens]
    assert prefixes.longest(prompt) == ({A: max(lengths)} if lengths else {})
