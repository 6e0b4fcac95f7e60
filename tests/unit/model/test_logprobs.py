"""Log-probabilities against the definition, in plain Python."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.logprobs import row_logprobs


def slow_twin(logits):
    largest = max(logits)
    total = math.log(math.fsum(math.exp(value - largest) for value in logits))
    return [value - largest - total for value in logits]


rows = st.lists(st.floats(-60, 60, width=32) | st.just(-math.inf), min_size=1, max_size=12).filter(
    lambda row: max(row) > -math.inf
)


@given(logits=rows, token=st.integers(0, 11), num_top=st.integers(0, 15))
def test_logprobs_equal_their_slow_twin(logits, token, num_top):
    token %= len(logits)
    expected = slow_twin(logits)
    found = row_logprobs(np.asarray(logits, dtype=np.float32), token, num_top)
    ranked = sorted(range(len(logits)), key=lambda index: (-logits[index], index))[:num_top]
    assert found.logprob == pytest.approx(expected[token], abs=1e-9)
    assert found.top_ids == ranked
    assert found.top_logprobs == pytest.approx([expected[index] for index in ranked], abs=1e-9)


def test_the_row_is_left_as_it_is():
    logits = np.asarray([1.0, 2.0], dtype=np.float32)
    row_logprobs(logits, 0, 2)
    assert logits.tolist() == [1.0, 2.0]


def test_the_first_of_the_most_likely_is_the_greedy_token():
    logits = np.asarray([0.0, 1e-30], dtype=np.float32)
    assert row_logprobs(logits, 0, 1).top_ids == [int(logits.argmax())]
