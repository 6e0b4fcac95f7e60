"""What clients of a gateway get: answers, and refusals with their classes."""

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from actors.request_channel import Submit
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.grpc_server import SERVICE
from cluster.api.topology import to_proto
from configs import errors
from configs.numerics import EndReason, FinishReason
from model.tokenizer_files import write_tokenizer_files
from tests.fakes.gateway_house import (
    VIEW,
    FixedTopology,
    answer_of,
    ask,
    ended,
    error_of,
)

pytestmark = pytest.mark.asyncio


async def test_tokens_arrive_in_order_and_the_last_message_is_finished(house):
    _, _, stub = await house.simple()
    token_ids, finished = await answer_of(stub.Generate(ask(max_tokens=20)))
    assert token_ids == list(range(10, 30))
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert finished.usage.prompt_tokens == 3
    assert finished.usage.output_tokens == 20
    assert finished.usage.time_to_first_token.ToTimedelta().total_seconds() == 0.25
    assert finished.request_id.startswith("g0-")


async def test_tokens_of_one_step_are_one_chunk(house):
    worker, _, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, [5, 6, 7])
    assert list((await call.read()).chunk.token_ids) == [5, 6, 7]
    await worker.send_end(submit)


async def test_stop_token_ends_the_answer_as_its_last_id(house):
    _, _, stub = await house.simple()
    token_ids, finished = await answer_of(stub.Generate(ask(max_tokens=20, stop_token_ids=[12])))
    assert token_ids == [10, 11, 12]
    assert finished.finish_reason == pb.FINISH_REASON_STOP


async def test_worker_is_told_the_end_tokens_of_the_model_unless_ignored(house):
    worker, _, stub = await house.simple()
    await answer_of(stub.Generate(ask(max_tokens=1, stop_token_ids=[9])))
    await answer_of(stub.Generate(ask(max_tokens=1, stop_token_ids=[9], ignore_eos=True)))
    submits = [message for message in worker.received if isinstance(message, Submit)]
    assert [submit.stop_token_ids for submit in submits] == [[2, 9], [9]]


async def test_seed_of_the_client_is_used_and_reported(house):
    worker, _, stub = await house.simple()
    seed = (1 << 64) - 1
    _, finished = await answer_of(
        stub.Generate(ask(max_tokens=1, sampling=pb.SamplingParams(seed=seed)))
    )
    assert finished.seed == seed
    assert (await worker.submitted.get()).sampling.seed == seed


async def test_unseeded_requests_get_different_seeds_which_are_reported(house):
    worker, _, stub = await house.simple()
    ends = [(await answer_of(stub.Generate(ask(max_tokens=1))))[1] for _ in range(2)]
    seeds = [(await worker.submitted.get()).sampling.seed for _ in range(2)]
    assert [end.seed for end in ends] == seeds
    assert seeds[0] != seeds[1]


async def test_unset_max_tokens_takes_what_context_and_worker_leave(house):
    worker, _, stub = await house.simple(max_request_tokens=50)
    await answer_of(stub.Generate(ask()))
    assert (await worker.submitted.get()).max_tokens == 47


async def test_resumed_answer_sends_only_what_the_client_lacks(house):
    _, _, stub = await house.simple()
    token_ids, finished = await answer_of(stub.Generate(ask(max_tokens=10, resume_offset=7)))
    assert token_ids == [17, 18, 19]
    assert finished.usage.output_tokens == 10


async def test_answer_longer_than_the_credit_is_complete(house):
    _, _, stub = await house.simple(burst=50)
    token_ids, _ = await answer_of(stub.Generate(ask(max_tokens=800, ignore_eos=True)))
    assert token_ids == [(10 + index) % 64 for index in range(800)]


async def test_score_returns_every_row_in_messages_below_the_default_limit(house):
    worker = await house.worker(vocab_size=100_000)
    gateway = await house.gateway(worker, vocab_size=100_000)
    stub = await house.stub(gateway)
    request = pb.ScoreRequest(token_ids=pb.TokenIds(ids=range(20)))
    responses = [response async for response in stub.Score(request)]
    assert max(len(response.logits) for response in responses) < 4 << 20
    assert [response.first_position for response in responses] == list(range(0, 20, 2))
    rows = np.frombuffer(b"".join(response.logits for response in responses), dtype="<f4")
    assert (rows.reshape(20, 100_000) == np.arange(20)[:, None]).all()


async def test_topology_is_what_the_source_says(house):
    _, _, stub = await house.simple()
    assert await stub.GetTopology(pb.GetTopologyRequest()) == to_proto(VIEW)


EURO = tuple("\u20ac".encode())


@pytest_asyncio.fixture
async def text_service(house, tmp_path):
    write_tokenizer_files(tmp_path)
    worker = await house.worker(is_manual=True, vocab_size=512)
    gateway = await house.gateway(worker, vocab_size=512, tokenizer_folder=tmp_path)
    return worker, await house.stub(gateway)


async def chunks_of(call):
    return [response.chunk.text async for response in call if response.HasField("chunk")]


async def test_text_is_encoded_and_special_names_in_it_are_plain_text(text_service):
    worker, stub = text_service
    text = "a\u20ac<|im_end|>"
    call = stub.Generate(pb.GenerateRequest(text=text, max_tokens=1))
    submit = await worker.submitted.get()
    assert submit.token_ids == list(text.encode())
    call.cancel()


async def test_text_of_an_answer_never_holds_half_a_character(text_service):
    worker, stub = text_service
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    responses = aiter(call)
    texts = []
    for token in (*EURO, *EURO[:2]):
        await worker.send_tokens(submit, [token])
        texts.append((await anext(responses)).chunk.text)
    await worker.send_end(submit)
    assert texts == ["", "", "\u20ac", "", ""]
    assert await chunks_of(responses) == ["\ufffd"]


async def test_stop_token_is_not_in_the_text(text_service):
    worker, stub = text_service
    call = stub.Generate(ask(stop_token_ids=[ord("!")]))
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, b"hi!")
    await worker.send_end(submit, finish_reason=FinishReason.STOP)
    assert await chunks_of(call) == ["hi"]


async def test_answer_resumed_inside_a_character_continues_its_text(text_service):
    worker, stub = text_service
    call = stub.Generate(ask(resume_offset=2))
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, EURO)
    await worker.send_end(submit)
    assert await chunks_of(call) == ["\u20ac"]


async def num_rows_of(call):
    return sum([response.num_rows async for response in call])


async def test_score_takes_text(text_service):
    worker, stub = text_service
    call = stub.Score(pb.ScoreRequest(text="ab"))
    submit = await worker.submitted.get()
    assert (submit.token_ids, submit.want_logits, submit.max_tokens) == ([97, 98], True, 0)
    await worker.send_rows(submit, 0, np.zeros((2, 512), dtype="<f4"))
    await worker.send_end(submit, finish_reason=None)
    assert await num_rows_of(call) == 2


async def test_score_that_lacks_rows_is_an_error_and_not_a_short_answer(text_service):
    worker, stub = text_service
    call = stub.Score(pb.ScoreRequest(text="ab"))
    submit = await worker.submitted.get()
    await worker.send_rows(submit, 0, np.zeros((1, 512), dtype="<f4"))
    await worker.send_end(submit, finish_reason=None)
    error, _ = await error_of(num_rows_of(call))
    assert isinstance(error, errors.InvariantError)


@pytest.mark.parametrize(
    ("request_", "cls", "code", "words"),
    [
        pytest.param(
            pb.GenerateRequest(), errors.InvalidRequestError, "INVALID_ARGUMENT", "unset",
            id="no prompt",
        ),
        pytest.param(
            pb.GenerateRequest(token_ids=pb.TokenIds()), errors.InvalidRequestError,
            "INVALID_ARGUMENT", "empty", id="empty prompt",
        ),
        pytest.param(
            ask(64), errors.InvalidRequestError, "INVALID_ARGUMENT", "0 to 63", id="id out of range"
        ),
        pytest.param(
            ask(*[1] * 901), errors.InvalidRequestError, "INVALID_ARGUMENT", "901 tokens",
            id="prompt beyond context",
        ),
        pytest.param(
            ask(max_tokens=0), errors.InvalidRequestError, "INVALID_ARGUMENT", "max_tokens is 0",
            id="max_tokens 0",
        ),
        pytest.param(
            ask(sampling=pb.SamplingParams(temperature=float("nan"))), errors.InvalidRequestError,
            "INVALID_ARGUMENT", "temperature is nan", id="temperature",
        ),
        pytest.param(
            ask(sampling=pb.SamplingParams(top_p=2)), errors.InvalidRequestError,
            "INVALID_ARGUMENT", "top_p is 2", id="top_p",
        ),
        pytest.param(
            ask(max_tokens=5, resume_offset=6), errors.InvalidRequestError, "INVALID_ARGUMENT",
            "resume_offset is 6", id="resume_offset",
        ),
        pytest.param(
            ask(model="k2"), errors.UnknownModelError, "NOT_FOUND", "'k2'", id="unknown model"
        ),
        pytest.param(
            pb.GenerateRequest(text="hi"), errors.TokenizerMissingError, "FAILED_PRECONDITION",
            "token_ids", id="text without tokenizer",
        ),
    ],
)  # fmt: skip
async def test_bad_request_is_refused_and_the_next_one_served(house, request_, cls, code, words):
    worker, gateway, stub = await house.simple()
    error, status = await error_of(stub.Generate(request_))
    assert (type(error), status.name) == (cls, code)
    assert words in error.message
    assert worker.received == []
    assert gateway.metrics.value(
        "latentmesh_requests_refused_total", operation="generate", code=cls.code
    ) == 1  # fmt: skip
    assert (await answer_of(stub.Generate(ask(max_tokens=1))))[0] == [10]


async def test_request_that_fits_no_worker_is_refused_as_such(house):
    _, _, stub = await house.simple(max_request_tokens=50)
    error, status = await error_of(stub.Generate(ask(max_tokens=48)))
    assert (type(error), status.name) == (errors.RequestTooLargeError, "FAILED_PRECONDITION")


async def test_requests_beyond_the_limit_are_refused_as_overload(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, max_running_requests=1)
    stub = await house.stub(gateway)
    first = stub.Generate(ask())
    submit = await worker.submitted.get()
    error, status = await error_of(stub.Generate(ask()))
    assert (type(error), status.name) == (errors.OverloadedError, "RESOURCE_EXHAUSTED")
    await worker.send_end(submit)
    await answer_of(first)


async def test_message_over_the_limit_is_refused(house):
    _, _, stub = await house.simple()
    error, _ = await error_of(stub.Generate(ask(*[1] * (2 << 20))))
    assert isinstance(error, errors.RequestTooLargeError)


async def test_refusal_of_the_worker_reaches_the_client_as_its_class(house):
    worker, gateway, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    await worker.send_end(
        submit, EndReason.REJECTED, error_code="OVERLOADED", error_message="queue of 8 is full"
    )
    error, status = await error_of(call)
    assert (type(error), error.message) == (errors.OverloadedError, "queue of 8 is full")
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ended(gateway, "rejected") == 1


async def test_unforeseen_error_is_internal_without_its_text(house):
    worker = await house.worker()
    gateway = await house.gateway(worker, topology=FixedTopology(ValueError("secret path")))
    stub = await house.stub(gateway)
    error, status = await error_of(stub.GetTopology(pb.GetTopologyRequest()))
    assert status is grpc.StatusCode.INTERNAL
    assert "secret" not in error.message
    method = f"/{SERVICE}/GetTopology"
    assert gateway.metrics.value("latentmesh_internal_errors_total", method=method) == 1


async def test_error_of_a_unary_call_carries_its_class(house):
    worker = await house.worker()
    source = FixedTopology(errors.StateStoreError("redis is gone"))
    stub = await house.stub(await house.gateway(worker, topology=source))
    error, status = await error_of(stub.GetTopology(pb.GetTopologyRequest()))
    assert (type(error), status.name) == (errors.StateStoreError, "UNAVAILABLE")
