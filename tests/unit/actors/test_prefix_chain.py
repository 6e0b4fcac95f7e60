"""Names of prefixes."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.prefix_chain import KEY_BYTES, chain_keys

tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(tokens, tokens, st.integers(1, 5))
def test_keys_are_equal_exactly_as_far_as_prefixes_are(one, other, block_tokens) -> None:
    pairs = list(zip(chain_keys(one, block_tokens), chain_keys(other, block_tokens), strict=False))
    for index, (key, other_key) in enumerate(pairs):
        end = (index + 1) * block_tokens
        assert (key == other_key) == (one[:end] == other[:end])


@given(tokens, st.integers(1, 5))
def test_there_is_a_key_per_whole_block(one, block_tokens) -> None:
    keys = list(chain_keys(one, block_tokens))
    assert len(keys) == len(one) // block_tokens
    assert len(set(keys)) == len(keys)
    assert all(len(key) == KEY_BYTES for key in keys)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ">i4"])
def test_the_type_of_the_tokens_does_not_matter(dtype) -> None:
    assert list(chain_keys(np.arange(9, dtype=dtype), 4)) == list(chain_keys(list(range(9)), 4))


def test_the_size_of_blocks_matters() -> None:
    assert list(chain_keys([1, 2, 3, 4], 4)) != list(chain_keys([1, 2, 3, 4], 2))[1:]


def test_keys_are_made_one_at_a_time() -> None:
    assert len(list(islice(chain_keys(np.zeros(1 << 20, dtype=np.int32), 16), 2))) == 2
