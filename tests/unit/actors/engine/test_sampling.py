"""From a lane's logits to tokens: each row by itself."""

import numpy as np
import pytest
import torch

from actors.engine.choosing import TokenChoice
from actors.engine.request import EngineRequest
from actors.engine.sampling import Sampled, sample_requests
from actors.request_channel import Sampling, Submit
from configs.errors import InvalidRequestError, InvariantError, ServingError
from model.logprobs import row_logprobs

VOCAB = 7


class StubMatcher:
    def __init__(self, allowed, error=""):
        self.allowed = allowed
        self.error = error
        self.is_complete = False

    def advance(self, token_id):
        pass


class StubGrammars:
    def matcher(self, grammar):
        return StubMatcher(set(map(ord, grammar)))

    def masks(self, matchers):
        return np.asarray([[token in m.allowed for token in range(VOCAB)] for m in matchers])


def request(matcher=None, logprobs=None, stop=(), **sampling):
    submit = Submit(
        "r", 0, [1, 2], 9, Sampling(**sampling), stop_token_ids=list(stop), logprobs=logprobs
    )
    return EngineRequest(submit, 0.0, 1, TokenChoice(submit, matcher), None, 9)


def sample(logits, requests):
    return sample_requests(torch.tensor(logits), requests, StubGrammars())


def rising(num_rows):
    return [[float(token) for token in range(VOCAB)] for _ in range(num_rows)]


def test_a_row_that_changes_leaves_the_others_alone():
    requests = [request(), request(logit_bias={0: 50.0}), request(StubMatcher({2, 3})), request()]
    assert [found.token_id for found in sample(rising(4), requests)] == [6, 0, 3, 6]


def test_logprobs_are_the_models_own_whatever_is_done_to_the_row():
    shaped = request(StubMatcher({1, 4}), logprobs=3, logit_bias={1: 50.0}, repetition_penalty=2.0)
    [found] = sample(rising(1), [shaped])
    raw = row_logprobs(np.asarray(rising(1)[0], dtype=np.float32), 1, 3)
    assert found.token_id == 1
    assert found.logprobs.logprob == raw.logprob
    assert found.logprobs.top_ids == [6, 5, 4]
    assert found.logprobs.top_logprobs == raw.top_logprobs


def test_stop_tokens_wait_for_the_shortest_answer():
    assert sample(rising(1), [request(stop=[6, 5], min_tokens=2)])[0].token_id == 4


def test_the_grammar_wins_over_the_shortest_answer():
    one = request(StubMatcher({6}), stop=[6], min_tokens=2)
    assert sample(rising(1), [one])[0].token_id == 6


@pytest.mark.parametrize(
    ("matcher", "kind", "text"),
    [
        pytest.param(StubMatcher(set(), "too many items"), InvalidRequestError, "items", id="full"),
        pytest.param(StubMatcher(set()), InvariantError, "allows no token", id="dead end"),
    ],
)
def test_a_grammar_that_fails_fails_its_request_only(matcher, kind, text):
    first, failed, last = sample(rising(3), [request(), request(matcher), request(logprobs=0)])
    assert isinstance(failed, kind)
    assert text in failed.message
    assert (first.token_id, last.token_id) == (6, 6)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_broken_logits_fail_their_row_only(value):
    logits = rising(3)
    logits[1][3] = value
    found = sample(logits, [request(), request(temperature=1.0, presence_penalty=1.0), request()])
    assert isinstance(found[1], ServingError)
    assert all(isinstance(found[row], Sampled) for row in (0, 2))


def test_a_row_without_wishes_is_not_changed():
    logits = torch.tensor(rising(2))
    sample_requests(logits, [request(logprobs=1), request(logit_bias={0: 1.0})], StubGrammars())
    assert logits[0].tolist() == rising(1)[0]
