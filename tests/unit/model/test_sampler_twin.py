"""The draw against a slow obvious twin over tiny vocabularies."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.sampler import SamplingRow, sample_tokens, uniform


def slow_twin(logits, row):
    """Tokens one by one: cut, then walk the kept ones until the draw is reached."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if row.temperature == 0:
        return ranked[0]
    largest = max(logits)
    weights = {token: math.exp((logits[token] - largest) / row.temperature) for token in ranked}
    kept = ranked[: row.top_k]
    if row.top_p < 1:
        goal = row.top_p * sum(weights[token] for token in sorted(kept))
        nucleus, reached = [], 0.0
        for token in kept:
            nucleus.append(token)
            reached += weights[token]
            if reached >= goal:
                break
        kept = nucleus
    kept = [token for token in kept if weights[token] >= row.min_p]
    threshold = uniform(row.seed, row.choice, row.position) * sum(
        weights[token] for token in sorted(kept)
    )
    reached = 0.0
    for token in sorted(kept):
        reached += weights[token]
        if reached > threshold:
            return token
    return max(kept)


@settings(max_examples=300, deadline=None)
@given(
    # Halves and integers: sums of weights that touch a border would differ by rounding only.
    logits=st.lists(
        st.integers(-12, 12).map(lambda n: n / 2) | st.just(-math.inf), min_size=1, max_size=8
    ).filter(lambda row: max(row) > -math.inf),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 9),
    top_p=st.sampled_from([0.123456, 0.51234, 0.876543, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.4321, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 5),
    position=st.integers(0, 1000),
)
def test_a_draw_equals_its_slow_twin(
    logits, temperature, top_k, top_p, min_p, seed, choice, position
):
    row = SamplingRow(temperature, top_p, top_k, min_p, seed, choice, position)
    assert sample_tokens(torch.tensor([logits]), [row]) == [slow_twin(logits, row)]
