"""Sampling: greedy, the cuts, and draws that depend on nothing but their own request."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import InvalidRequestError, InvariantError
from model.sampler import SamplingRow, sample_tokens, uniform


def draws(logits: list[float], count: int, **fields: object) -> list[int]:
    batch = torch.tensor([logits]).expand(count, -1)
    rows = [SamplingRow(position=i, seed=11, **fields) for i in range(count)]
    return sample_tokens(batch, rows)


def test_greedy_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 2.0]])
    assert sample_tokens(logits, [SamplingRow(), SamplingRow()]) == [1, 0]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [77, 78, 4999]] = 3.0
    assert sample_tokens(logits, [SamplingRow()]) == [77]


def test_no_rows_give_no_tokens() -> None:
    assert sample_tokens(torch.zeros(0, 8), []) == []


def test_frequencies_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    count = 20_000
    seen = np.bincount(draws(logits, count, temperature=1.0), minlength=5)
    expected = torch.softmax(torch.tensor(logits), -1).numpy() * count
    chi_squared = float(((seen - expected) ** 2 / expected).sum())
    assert chi_squared < 18.5  # 0.1 % of samples with 4 degrees of freedom lie above


def test_temperature_scales_the_logits() -> None:
    count = 20_000
    hot = np.bincount(draws([0.0, 2.0], count, temperature=2.0), minlength=2)[1] / count
    assert hot == pytest.approx(1 / (1 + math.exp(-1.0)), abs=0.01)


@pytest.mark.parametrize("temperature", [1e-9, 5e-324])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = [1.0, 1.0 + 1e-3, -3e38, -math.inf]
    assert set(draws(logits, 50, temperature=temperature)) == {1}


def test_top_k_keeps_only_the_most_likely() -> None:
    assert set(draws([3.0, 2.9, 2.8, 2.7], 300, temperature=1.0, top_k=2)) == {0, 1}


def test_top_k_ranks_equals_by_lower_id() -> None:
    assert set(draws([1.0, 2.0, 1.0, 1.0], 300, temperature=1.0, top_k=2)) == {0, 1}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert set(draws([0.0, 0.0, 0.0], 100, temperature=1.0, top_k=9)) == {0, 1, 2}


def test_top_p_keeps_the_token_that_crosses_the_sum() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(draws(logits, 400, temperature=1.0, top_p=0.6)) == {0, 1}


def test_tiny_top_p_keeps_the_most_likely() -> None:
    assert set(draws([0.0, 0.1, 0.0], 50, temperature=1.0, top_p=1e-12)) == {1}


def test_top_p_counts_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the two kept, the first has 4/7 = 0.571.
    assert set(draws(logits, 200, temperature=1.0, top_k=2, top_p=0.57)) == {0}


def test_wide_nucleus_is_found_beyond_the_first_ranks() -> None:
    kept = draws([0.0] * 3000, 4000, temperature=1.0, top_p=0.5)
    assert max(kept) == 1499


def test_masked_tokens_are_never_drawn() -> None:
    assert set(draws([-math.inf, 0.0, -math.inf], 50, temperature=1.0)) == {1}


@settings(max_examples=40, deadline=None)
@given(
    num_before=st.integers(0, 5),
    num_after=st.integers(0, 5),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**20),
    temperature=st.floats(0.1, 3.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.none() | st.integers(1, 40),
)
def test_draw_does_not_depend_on_the_batch(
    num_before: int,
    num_after: int,
    seed: int,
    position: int,
    temperature: float,
    top_p: float,
    top_k: int | None,
) -> None:
    logits = torch.randn(num_before + 1 + num_after, 33, generator=torch.Generator().manual_seed(5))
    row = SamplingRow(temperature, top_p, top_k, seed=seed, position=position)
    other = SamplingRow(temperature=1.0, seed=1)
    batch = [other] * num_before + [row] + [other] * num_after
    alone = sample_tokens(logits[num_before : num_before + 1], [row])
    assert sample_tokens(logits, batch)[num_before] == alone[0]


def test_seed_choice_and_position_each_change_the_draw() -> None:
    base = uniform(1, 0, 0)
    assert len({base, uniform(2, 0, 0), uniform(1, 1, 0), uniform(1, 0, 1)}) == 4


def test_draws_are_fixed_for_ever() -> None:
    # Philox-4x64-10 is specified; a change here would break replays of running requests.
    generator = np.random.Philox(key=42, counter=[7, 3, 0, 0])
    assert uniform(42, 3, 7) == (int(generator.random_raw()) >> 11) / 2**53
    assert uniform(42, 3, 7) == 0.6596202665651832


def test_uniform_numbers_fill_the_unit_interval() -> None:
    values = np.array([uniform(5, 0, position) for position in range(4000)])
    assert 0.0 <= values.min() < 0.01
    assert 0.99 < values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.02


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; expected >= 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_p": 0.0}, "top_p is 0.0; expected 0 < top_p <= 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_k": 0}, "top_k is 0; expected >= 1"),
    ],
    ids=str,
)
def test_field_out_of_range_is_named(fields: dict, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingRow(**fields)


def test_rows_must_fit_the_logits() -> None:
    with pytest.raises(InvariantError, match="2 rows of logits for 1 requests"):
        sample_tokens(torch.zeros(2, 4), [SamplingRow()])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_name_their_rows(value: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = value
    with pytest.raises(InvariantError, match=r"rows \[1\]"):
        sample_tokens(logits, [SamplingRow()] * 3)
