import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.params import GenerateParams, SamplingParams, StopParams
from cluster.api.validation import (
    Limits,
    check_generate,
    check_prompt,
    check_prompt_length,
    resolve_max_tokens,
)
from configs.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    TokenizerMissingError,
    UnknownModelError,
)

LIMITS = Limits(model_name="k3", vocab_size=64, context_tokens=100, has_tokenizer=False)
TEXT_LIMITS = Limits(model_name="k3", vocab_size=64, context_tokens=100, has_tokenizer=True)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        pytest.param(GenerateParams(None), ("prompt", "unset"), id="no prompt"),
        pytest.param(GenerateParams([]), ("token_ids", "at least 1"), id="empty ids"),
        pytest.param(GenerateParams([1, 64]), ("token_ids[1]", "64", "0 to 63"), id="id = vocab"),
        pytest.param(GenerateParams([-1]), ("token_ids[0]", "-1", "0 to 63"), id="negative id"),
        pytest.param(
            GenerateParams([1], stop=StopParams(token_ids=[2, 99])),
            ("stop_token_ids[1]", "99", "0 to 63"),
            id="stop id",
        ),
        pytest.param(GenerateParams([1], max_tokens=0), ("max_tokens", "0", "1 to"), id="max 0"),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(temperature=-0.5)),
            ("temperature", "-0.5", ">= 0"),
            id="cold",
        ),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(temperature=math.nan)),
            ("temperature", "nan"),
            id="nan",
        ),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(temperature=math.inf)),
            ("temperature", "inf"),
            id="inf",
        ),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(top_p=0.0)),
            ("top_p", "0.0", "at most 1"),
            id="top_p 0",
        ),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(top_p=1.5)),
            ("top_p", "1.5", "at most 1"),
            id="top_p big",
        ),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(top_p=math.nan)),
            ("top_p", "nan"),
            id="top_p nan",
        ),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(top_k=-1)), ("top_k", "-1"), id="top_k"
        ),
        pytest.param(
            GenerateParams([1], sampling=SamplingParams(seed=1 << 64)),
            ("seed", str(1 << 64)),
            id="seed",
        ),
        pytest.param(GenerateParams([1], resume_offset=-1), ("resume_offset", "-1"), id="resume"),
    ],
)
def test_bad_field_is_refused_with_its_name_value_and_range(params, words):
    with pytest.raises(InvalidRequestError) as caught:
        check_generate(params, LIMITS)
    for word in words:
        assert word in caught.value.message


def test_text_without_tokenizer_is_refused_with_what_to_send():
    with pytest.raises(TokenizerMissingError, match="token_ids"):
        check_generate(GenerateParams("hello"), LIMITS)


def test_empty_text_is_refused():
    with pytest.raises(InvalidRequestError, match="text is empty"):
        check_generate(GenerateParams(""), TEXT_LIMITS)


def test_other_model_is_refused_with_the_served_name():
    with pytest.raises(UnknownModelError, match=r"'k2'.*'k3'"):
        check_generate(GenerateParams([1], model="k2"), LIMITS)


@pytest.mark.parametrize("model", ["", "k3"], ids=["unset", "served"])
def test_served_model_is_accepted(model):
    assert check_generate(GenerateParams([1], model=model), LIMITS) == [1]


def test_top_k_beyond_the_vocabulary_is_accepted():
    check_generate(GenerateParams([1], sampling=SamplingParams(top_k=1000)), LIMITS)


def test_prompt_beyond_the_context_is_refused_with_value_and_limit():
    with pytest.raises(InvalidRequestError, match="101 tokens; allowed: 1 to 100"):
        check_prompt_length(101, LIMITS, num_reserved=0)


def test_token_ids_beyond_the_context_are_refused_for_their_number_before_their_values():
    with pytest.raises(InvalidRequestError, match="100 tokens; allowed: 1 to 99"):
        check_generate(GenerateParams([1] * 99 + [64]), LIMITS)
    with pytest.raises(InvalidRequestError, match="101 tokens; allowed: 1 to 100"):
        check_prompt("", [1] * 100 + [64], LIMITS)


def test_token_ids_that_fill_the_context_can_be_scored():
    assert check_prompt("", [1] * 100, LIMITS) == [1] * 100


def test_prompt_that_leaves_no_room_for_an_answer_is_refused():
    with pytest.raises(InvalidRequestError, match="100 tokens; allowed: 1 to 99"):
        resolve_max_tokens(100, GenerateParams([1]), LIMITS, worker_tokens=1000)


def test_max_tokens_beyond_the_context_is_refused_with_what_is_left():
    with pytest.raises(InvalidRequestError, match="max_tokens is 41; allowed: 1 to 40"):
        resolve_max_tokens(60, GenerateParams([1], max_tokens=41), LIMITS, worker_tokens=1000)


def test_request_that_fits_no_worker_is_too_large():
    with pytest.raises(RequestTooLargeError, match="50 tokens"):
        resolve_max_tokens(30, GenerateParams([1], max_tokens=21), LIMITS, worker_tokens=50)


def test_prompt_that_fits_no_worker_is_too_large():
    with pytest.raises(RequestTooLargeError, match="50 tokens"):
        resolve_max_tokens(60, GenerateParams([1]), LIMITS, worker_tokens=50)


def test_resume_offset_beyond_the_answer_is_refused():
    params = GenerateParams([1], max_tokens=5, resume_offset=6)
    with pytest.raises(InvalidRequestError, match="resume_offset is 6; allowed: 0 to max_tokens"):
        resolve_max_tokens(1, params, LIMITS, worker_tokens=1000)


@settings(deadline=None)
@given(
    num_prompt=st.integers(1, 200),
    max_tokens=st.none() | st.integers(1, 200),
    worker_tokens=st.integers(1, 200),
)
def test_resolved_answer_is_at_least_one_token_and_fits_context_and_worker(
    num_prompt, max_tokens, worker_tokens
):
    params = GenerateParams([1], max_tokens=max_tokens)
    wanted = 1 if max_tokens is None else max_tokens
    fits = num_prompt + wanted <= min(LIMITS.context_tokens, worker_tokens)
    try:
        resolved = resolve_max_tokens(num_prompt, params, LIMITS, worker_tokens=worker_tokens)
    except (InvalidRequestError, RequestTooLargeError):
        assert not fits
    else:
        assert fits
        assert max_tokens in (None, resolved)
        assert num_prompt + resolved <= min(LIMITS.context_tokens, worker_tokens)
