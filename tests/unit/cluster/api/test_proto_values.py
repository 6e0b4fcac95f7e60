from dataclasses import replace

import numpy as np
import pytest

from actors.request_channel import TokenLogprobs, Usage
from cluster.api.answers import Chunk, Finished, ScoreRows
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.params import (
    GenerateParams,
    SamplingParams,
    ScoreParams,
    StopParams,
)
from cluster.api.proto_values import (
    read_event,
    read_generate,
    read_rows,
    read_score,
    write_event,
    write_generate,
    write_rows,
    write_score,
)
from configs.errors import InvariantError
from configs.ids import RequestId
from configs.numerics import FinishReason
from model.constraint import Constraint, ConstraintKind


def listed(params):
    """With a prompt of token ids that compares with tuples."""
    is_ids = not isinstance(params.prompt, str | None)
    return replace(params, prompt=tuple(params.prompt)) if is_ids else params


@pytest.mark.parametrize(
    "params",
    [
        GenerateParams((1, 2)),
        GenerateParams("text", model="k3"),
        GenerateParams(()),
        GenerateParams(None),
        GenerateParams(
            (1,), max_tokens=0, sampling=SamplingParams(temperature=0.0, top_p=0.0, top_k=0, seed=0)
        ),
        GenerateParams(
            (1,),
            max_tokens=9,
            sampling=SamplingParams(
                temperature=0.5,
                top_p=0.25,
                top_k=3,
                min_p=0.125,
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                logit_bias={3: 1.5, 7: -100.0},
                seed=(1 << 64) - 1,
            ),
            stop=StopParams(
                texts=("a", "bc"),
                token_ids=(4, 5),
                ignore_eos=True,
                min_tokens=2,
                include_text=True,
            ),
            num_choices=3,
            constraint=Constraint(ConstraintKind.REGEX, "a+"),
            logprobs=2,
            prompt_logprobs=0,
            priority=-7,
            resume_offset=6,
        ),
    ],
    ids=["ids", "text", "empty ids", "no prompt", "zeros are values", "all fields"],
)
def test_generate_request_survives_the_wire(params):
    request = pb.GenerateRequest.FromString(write_generate(params).SerializeToString())
    assert listed(read_generate(request)) == params


@pytest.mark.parametrize("prompt", [(1, 2), "text", None], ids=["ids", "text", "none"])
def test_score_request_survives_the_wire(prompt):
    params = ScoreParams(prompt, model="k3")
    assert listed(read_score(write_score(params))) == params


@pytest.mark.parametrize("read", [read_generate, read_score], ids=["generate", "score"])
def test_token_ids_are_not_copied(read):
    kind = pb.GenerateRequest if read is read_generate else pb.ScoreRequest
    request = kind(token_ids=pb.TokenIds(ids=[1, 2]))
    prompt = read(request).prompt
    request.token_ids.ids.append(3)
    assert list(prompt) == [1, 2, 3]


@pytest.mark.parametrize("reason", FinishReason)
def test_finished_survives_the_wire(reason):
    usage = Usage(3, 2, 9, queue_s=0.125, first_token_s=0.25, total_s=1.5)
    event = Finished(reason, usage, seed=7, request_id=RequestId("g-1"))
    assert read_event(write_event(event)) == event


@pytest.mark.parametrize("matched", [None, 0, 7, "stop"], ids=repr)
def test_what_stopped_a_choice_survives_the_wire(matched):
    event = Finished(
        FinishReason.STOP, Usage(), seed=0, request_id=RequestId("g-1.2"), choice=2,
        matched_stop=matched,
    )  # fmt: skip
    assert read_event(write_event(event)) == event


@pytest.mark.parametrize(
    "event",
    [
        Chunk((5, 6), "\u20ac"),
        Chunk((5,), "a", choice=3, logprobs=(TokenLogprobs(-0.5, [5, 7], [-0.5, -1.25]),)),
        Chunk(
            (), "", prompt_logprobs=(TokenLogprobs(-2.0), TokenLogprobs(-4.0)), prompt_position=1
        ),
    ],
    ids=["text", "choice and logprobs", "prompt logprobs"],
)
def test_chunk_survives_the_wire(event):
    assert read_event(write_event(event)) == event


@pytest.mark.parametrize(
    "response",
    [pb.GenerateResponse(), pb.GenerateResponse(finished=pb.Finished(finish_reason=0))],
    ids=["no event", "no reason"],
)
def test_event_that_this_version_does_not_know_is_an_error(response):
    with pytest.raises(InvariantError, match="update it"):
        read_event(response)


def test_rows_survive_the_wire():
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows = read_rows(write_rows(ScoreRows(4, logits)))
    assert rows.first_position == 4
    assert (rows.logits == logits).all()


def test_rows_whose_counts_lie_are_an_error():
    with pytest.raises(InvariantError, match="2 logits for 1 rows of 3"):
        read_rows(pb.ScoreResponse(num_rows=1, vocab_size=3, logits=bytes(8)))
