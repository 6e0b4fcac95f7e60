"""Sampling, stops, choices and constraints: what is refused and what lets clients live."""

import math

import pytest

from cluster.api.params import GenerateParams, SamplingParams, StopParams
from cluster.api.validation import (
    MAX_PROMPT_LOGPROB_VALUES,
    Limits,
    check_generate,
    check_prompt_logprobs,
    resolve_max_tokens,
)
from configs.errors import InvalidRequestError, TokenizerMissingError
from model.constraint import Constraint, ConstraintKind

LIMITS = Limits(model_name="k3", vocab_size=64, context_tokens=100, has_tokenizer=True)
REGEX = Constraint(ConstraintKind.REGEX, "a")


def sampled(**kwargs):
    return GenerateParams([1], sampling=SamplingParams(**kwargs))


def stopped(**kwargs):
    return GenerateParams([1], stop=StopParams(**kwargs))


@pytest.mark.parametrize(
    ("params", "words"),
    [
        pytest.param(sampled(min_p=-0.1), ("min_p is -0.1", "0 to 1"), id="min_p low"),
        pytest.param(sampled(min_p=1.5), ("min_p is 1.5", "0 to 1"), id="min_p high"),
        pytest.param(sampled(min_p=math.nan), ("min_p is nan",), id="min_p nan"),
        pytest.param(
            sampled(repetition_penalty=0.0), ("repetition_penalty is 0.0", "above 0"), id="rep 0"
        ),
        pytest.param(
            sampled(repetition_penalty=101.0), ("repetition_penalty is 101", "100"), id="rep high"
        ),
        pytest.param(
            sampled(repetition_penalty=math.nan), ("repetition_penalty is nan",), id="rep nan"
        ),
        pytest.param(
            sampled(presence_penalty=2.5), ("presence_penalty is 2.5", "-2 to 2"), id="presence"
        ),
        pytest.param(
            sampled(frequency_penalty=-2.5),
            ("frequency_penalty is -2.5", "-2 to 2"),
            id="frequency",
        ),
        pytest.param(
            sampled(logit_bias={64: 1.0}), ("logit_bias names token 64", "0 to 63"), id="bias id"
        ),
        pytest.param(
            sampled(logit_bias={3: 101.0}), ("logit_bias[3] is 101", "-100 to 100"), id="bias value"
        ),
        pytest.param(sampled(logit_bias={3: math.nan}), ("logit_bias[3] is nan",), id="bias nan"),
        pytest.param(
            sampled(logit_bias=dict.fromkeys(range(1025), 0.0)),
            ("logit_bias has 1025 entries", "1024"),
            id="biases",
        ),
        pytest.param(stopped(texts=["x"] * 10_000), ("stop has 10000 entries", "64"), id="stops"),
        pytest.param(stopped(texts=["a", ""]), ("stop[1] has 0 characters",), id="empty stop"),
        pytest.param(stopped(texts=["a" * 1025]), ("stop[0] has 1025", "1024"), id="long stop"),
        pytest.param(
            stopped(texts=["a" * 1000] * 64), ("stop has 64000 characters", "8192"), id="all stops"
        ),
        pytest.param(stopped(texts=["\ud800"]), ("stop[0]", "surrogate"), id="stop surrogate"),
        pytest.param(
            stopped(token_ids=[1] * 1025), ("stop_token_ids has 1025", "1024"), id="stop ids"
        ),
        pytest.param(stopped(min_tokens=-1), ("min_tokens is -1", "0 to 100"), id="min_tokens"),
        pytest.param(GenerateParams([1], num_choices=0), ("num_choices is 0",), id="n 0"),
        pytest.param(GenerateParams([1], num_choices=129), ("num_choices is 129", "128"), id="n"),
        pytest.param(
            GenerateParams([1], logprobs=21), ("logprobs is 21", "0 to 20"), id="logprobs"
        ),
        pytest.param(
            GenerateParams([1], priority=-101),
            ("priority is -101", "-100 to 100"),
            id="priority low",
        ),
        pytest.param(GenerateParams([1], priority=101), ("priority is 101",), id="priority high"),
        pytest.param(
            GenerateParams([1], prompt_logprobs=-1),
            ("prompt_logprobs is -1",),
            id="prompt logprobs",
        ),
        pytest.param(
            GenerateParams([1], num_choices=2, resume_offset=1),
            ("resume_offset is 1", "num_choices 2"),
            id="resume of several",
        ),
        pytest.param(GenerateParams("a\udfff"), ("text", "U+DFFF", "character 1"), id="surrogate"),
        pytest.param(
            GenerateParams([1], constraint=Constraint(ConstraintKind.REGEX, "\ud800")),
            ("constraint", "surrogate"),
            id="constraint surrogate",
        ),
    ],
)
def test_bad_field_is_refused_with_its_name_value_and_range(params, words):
    with pytest.raises(InvalidRequestError) as caught:
        check_generate(params, LIMITS)
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(sampled(min_p=0.0), id="min_p 0"),
        pytest.param(sampled(min_p=1.0), id="min_p 1"),
        pytest.param(sampled(logit_bias={0: -100.0, 63: 100.0}), id="bias bounds"),
        pytest.param(stopped(texts=["a" * 128] * 64, token_ids=range(64)), id="many stops"),
        pytest.param(GenerateParams([1], num_choices=128), id="greedy with many choices"),
        pytest.param(GenerateParams([1], priority=-100), id="priority first"),
        pytest.param(GenerateParams([1], priority=100), id="priority last"),
        pytest.param(GenerateParams([1], logprobs=20, prompt_logprobs=0), id="logprobs"),
        pytest.param(
            GenerateParams([1], constraint=REGEX, stop=StopParams(ignore_eos=True)),
            id="constraint with ignore_eos",
        ),
    ],
)
def test_edges_of_the_ranges_are_accepted(params):
    check_generate(params, LIMITS)


@pytest.mark.parametrize(
    "params",
    [stopped(texts=["a"]), GenerateParams([1], constraint=REGEX)],
    ids=["stop text", "constraint"],
)
def test_what_needs_text_is_refused_without_a_tokenizer(params):
    limits = Limits(model_name="k3", vocab_size=64, context_tokens=100, has_tokenizer=False)
    with pytest.raises(TokenizerMissingError):
        check_generate(params, limits)


def test_more_min_tokens_than_the_answer_may_have_are_refused():
    params = GenerateParams([1], max_tokens=5, stop=StopParams(min_tokens=6))
    with pytest.raises(InvalidRequestError, match=r"min_tokens is 6; allowed: 0 to max_tokens \(5"):
        resolve_max_tokens(1, params, LIMITS, worker_tokens=100)


@pytest.mark.parametrize("count", [0, 20])
def test_log_probabilities_of_a_prompt_are_refused_when_they_are_too_many(count):
    num_fitting = MAX_PROMPT_LOGPROB_VALUES // (count + 1)
    params = GenerateParams([1], prompt_logprobs=count)
    check_prompt_logprobs(num_fitting, params)
    with pytest.raises(InvalidRequestError, match=str(MAX_PROMPT_LOGPROB_VALUES)):
        check_prompt_logprobs(num_fitting + 1, params)
