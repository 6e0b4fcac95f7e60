"""What one worker refuses, whoever sent it: nothing may break the step of other requests."""

import math

import msgspec
import pytest

from actors.engine.admission import MAX_GRAMMAR_CHARS, MAX_SHAPING, find_refusal
from actors.request_channel import Sampling
from configs.errors import InvalidRequestError
from tests.fakes.engine_rig import VOCAB, limits, submit

LONG = "x" * (64 << 10)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 1001}, "logprobs is 1001; it must be 0 to 1000"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"sampling": Sampling(choice=-1)}, "choice is -1"),
        ({"sampling": Sampling(seed=1 << 64)}, "seed is 18446744073709551616"),
        ({"sampling": Sampling(presence_penalty=1e39)}, "presence_penalty is 1e"),
        ({"sampling": Sampling(frequency_penalty=-math.inf)}, "frequency_penalty is -inf"),
        ({"sampling": Sampling(repetition_penalty=1e-300)}, "repetition_penalty is 1e-300"),
        ({"sampling": Sampling(repetition_penalty=math.nan)}, "repetition_penalty is nan"),
        ({"sampling": Sampling(logit_bias={3: math.nan})}, r"logit_bias\[3\] is nan"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, r"logit_bias\[0\] is 61"),
        ({"sampling": Sampling(min_p=1.5)}, "min_p is 1.5"),
        (
            {"sampling": Sampling(min_tokens=1), "stop_token_ids": list(range(VOCAB))},
            "stop_token_ids holds all 61 tokens",
        ),
        ({"grammar": LONG, "num_choices": 17}, f"makes 1114112; allowed: {MAX_GRAMMAR_CHARS}"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_a_value_out_of_range_is_named(changes, text):
    refusal = find_refusal(msgspec.structs.replace(submit(), **changes), limits())
    assert isinstance(refusal, InvalidRequestError)
    with pytest.raises(InvalidRequestError, match=text):
        raise refusal


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": 0, "prompt_logprobs": 1000},
        {"sampling": Sampling(repetition_penalty=MAX_SHAPING, presence_penalty=-MAX_SHAPING)},
        {"sampling": Sampling(logit_bias={0: -MAX_SHAPING, VOCAB - 1: MAX_SHAPING})},
        {"stop_token_ids": list(range(VOCAB))},
        {"grammar": LONG, "num_choices": 16},
    ],
    ids=",".join,
)
def test_the_ends_of_the_ranges_are_taken(changes):
    assert find_refusal(msgspec.structs.replace(submit(), **changes), limits()) is None
