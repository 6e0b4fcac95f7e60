import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.logit_shaping import LogitShape, shape_logits
from model.token_counts import TokenCounts

VOCAB = 9
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def slow_twin(logits, bias, penalties, prompt, answer, ruled_out, allowed):
    """The same in plain Python, token by token."""
    repetition, presence, frequency = penalties
    shaped = []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in prompt or token in answer:
            value = value / repetition if value > 0 else value * repetition
        if token in answer:
            value -= presence + frequency * answer.count(token)
        shaped.append(value)
    cut = [-math.inf if token in ruled_out else value for token, value in enumerate(shaped)]
    if allowed is None:
        return cut
    if not any(math.isfinite(cut[token]) for token in allowed):
        cut = shaped
    return [value if token in allowed else -math.inf for token, value in enumerate(cut)]


@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=VOCAB, max_size=VOCAB),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32)),
    penalties=st.tuples(
        st.floats(0.25, 4, width=32), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32)
    ),
    prompt=tokens,
    answer=tokens,
    ruled_out=st.sets(st.integers(0, VOCAB - 1), max_size=4),
    allowed=st.one_of(st.none(), st.sets(st.integers(0, VOCAB - 1), min_size=1)),
)
def test_shaping_equals_its_slow_twin(logits, bias, penalties, prompt, answer, ruled_out, allowed):
    row = np.asarray(logits, dtype=np.float32)
    shape = LogitShape(
        np.asarray(sorted(bias), dtype=np.int64),
        np.asarray([bias[token] for token in sorted(bias)], dtype=np.float32),
        *penalties,
    )
    counts = TokenCounts(prompt)
    for token in answer:
        counts.append(token)
    mask = None
    if allowed is not None:
        mask = np.asarray([token in allowed for token in range(VOCAB)])
    shape_logits(
        row, shape, counts, ruled_out=np.asarray(sorted(ruled_out), np.int64), allowed_V=mask
    )
    expected = slow_twin(logits, bias, penalties, prompt, answer, ruled_out, allowed)
    assert row == pytest.approx(np.asarray(expected), rel=1e-4, abs=1e-4)


@given(prompt=tokens, answer=tokens)
def test_counts_are_those_of_a_recount(prompt, answer):
    counts = TokenCounts(prompt)
    for token in answer:
        counts.append(token)
    found = dict(zip(counts.answer_ids.tolist(), counts.answer_counts.tolist(), strict=True))
    assert found == {token: answer.count(token) for token in answer}
    assert sorted(counts.seen_ids.tolist()) == sorted({*prompt, *answer})
