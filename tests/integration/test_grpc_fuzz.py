"""Whatever is sent to the gRPC door: a status that says why, never an internal error or a hang."""

import asyncio
import contextlib

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from cluster.api.gateway_settings import AttentionEndpoint
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.generated.latentmesh.v1 import inference_pb2_grpc
from model.tokenizer_files import write_tokenizer_files
from tests.fakes.gateway_house import wait_idle
from tests.fakes.text_house import text_gateway
from tests.fakes.waiting import until

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

MAX_TRAILER_BYTES = 4096
FINE = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}

floats = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e38, -1e38, float("inf"), float("-inf"), float("nan")]),
    st.floats(width=32),
)
small = st.integers(0, 6)
uint32s = st.one_of(small, st.sampled_from([(1 << 31), (1 << 32) - 1]), st.integers(0, 1000))
texts = st.one_of(
    st.text(max_size=20), st.sampled_from(["", "<|end_of_msg|>" * 40, "\x00", "é" * 99])
)
ids = st.lists(st.one_of(st.integers(0, 511), uint32s), max_size=12)


def some(**fields):
    """A dictionary with any subset of the fields, most often a small one.

    With every second field out of range nothing would ever be accepted, and nothing but the first
    check would ever refuse.
    """
    few = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )
    return st.one_of(few, few, st.fixed_dictionaries({}, optional=fields))


schemas = st.sampled_from(
    [
        '{"type": "integer"}',
        '{"const": "\\ud800"}',
        '{"properties": {"\\ud800": {}}}',
        '{"const": ' + "9" * 5000 + "}",
        '{"const": 1e999}',
        '{"anyOf": []}',
        '{"$ref": "#"}',
        '{"items":' * 100 + "{}" + "}" * 100,
        "[" * 9999,
        "true",
    ]
)
constraints = st.one_of(
    st.none(),
    st.builds(lambda t: pb.Constraint(json_schema=t), schemas),
    st.builds(lambda t: pb.Constraint(json_schema=t), texts),
    st.builds(lambda t: pb.Constraint(regex=t), texts),
    st.builds(lambda t: pb.Constraint(grammar=t), texts),
    st.builds(lambda t: pb.Constraint(choices=pb.Choices(texts=t)), st.lists(texts, max_size=3)),
    st.builds(lambda b: pb.Constraint(json_object=b), st.booleans()),
    st.sampled_from(
        [
            pb.Constraint(regex="a+"),
            pb.Constraint(regex="(a{999}){9}"),
        ]
    ),
)
prompts = st.one_of(
    st.just({"text": "a"}),
    st.fixed_dictionaries({"text": texts}),
    st.fixed_dictionaries({"token_ids": st.builds(lambda i: pb.TokenIds(ids=i), ids)}),
    st.just({}),
)
models = st.sampled_from(["", "k3", "k3", "other", "\u2603"])
scores = st.builds(
    lambda prompt, model: pb.ScoreRequest(model=model, **prompt),
    prompts,
    models,
)
sampling = st.builds(
    lambda fields: pb.SamplingParams(**fields),
    some(
        temperature=floats,
        top_p=floats,
        top_k=uint32s,
        seed=st.integers(0, (1 << 64) - 1),
        min_p=floats,
        repetition_penalty=floats,
        presence_penalty=floats,
        frequency_penalty=floats,
        logit_bias=st.dictionaries(uint32s, floats, max_size=3),
    ),
)
generates = st.builds(
    lambda prompt, fields: pb.GenerateRequest(**prompt, **fields),
    prompts,
    some(
        model=models,
        max_tokens=uint32s,
        sampling=sampling,
        stop_token_ids=ids,
        ignore_eos=st.booleans(),
        resume_offset=uint32s,
        stop=st.lists(texts, max_size=70),
        include_stop_text=st.booleans(),
        min_tokens=uint32s,
        num_choices=uint32s,
        constraint=constraints,
        logprobs=uint32s,
        prompt_logprobs=uint32s,
    ),
)
int32s = st.one_of(small, st.sampled_from([-1, -(1 << 31), (1 << 31) - 1]))
vllm_constraints = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"json_schema": schemas | texts}),
    st.fixed_dictionaries({"regex": texts}),
    st.fixed_dictionaries({"grammar": texts}),
    st.fixed_dictionaries({"structural_tag": texts}),
    st.fixed_dictionaries({"json_object": st.booleans()}),
    st.fixed_dictionaries(
        {"choice": st.builds(lambda c: vllm.ChoiceConstraint(choices=c), st.lists(texts))}
    ),
)
vllm_generates = st.builds(
    lambda prompt, name, stream, params, constraint: vllm.GenerateRequest(
        request_id=name,
        stream=stream,
        sampling_params=vllm.SamplingParams(**params, **constraint),
        **prompt,
    ),
    st.one_of(
        st.just({"tokenized": vllm.TokenizedInput(input_ids=[1, 2])}),
        st.fixed_dictionaries({"text": texts}),
        st.fixed_dictionaries(
            {"tokenized": st.builds(lambda i: vllm.TokenizedInput(input_ids=i), ids)}
        ),
        st.just({}),
    ),
    texts,
    st.booleans(),
    some(
        temperature=floats,
        top_p=floats,
        top_k=uint32s,
        min_p=floats,
        frequency_penalty=floats,
        repetition_penalty=floats,
        max_tokens=uint32s,
        min_tokens=uint32s,
        stop=st.lists(texts, max_size=4),
        stop_token_ids=ids,
        ignore_eos=st.booleans(),
        n=uint32s,
        logprobs=int32s,
        prompt_logprobs=int32s,
        seed=int32s,
        logit_bias=st.dictionaries(int32s, floats, max_size=3),
        truncate_prompt_tokens=int32s,
    ),
    vllm_constraints,
)


async def status_of(call):
    """Read a stream to its end; None, or the status that ended it, checked for its form."""
    error = None
    try:
        async with asyncio.timeout(30):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as exc:
        error = exc
    if error is None:
        return None
    size = sum(len(key) + len(value) for key, value in error.trailing_metadata())
    assert size + 3 * len((error.details() or "").encode()) < MAX_TRAILER_BYTES
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in rpc_status.from_call(error).details)
    assert info.reason
    return error.code().name


@pytest.fixture
def folder(tmp_path):
    write_tokenizer_files(tmp_path)
    return tmp_path


async def door(house, folder):
    worker = await house.worker(vocab_size=512, max_request_tokens=300, burst=64)
    endpoints = [AttentionEndpoint(worker.name, worker.address)]
    gateway = await text_gateway(
        house, endpoints, folder, context_tokens=300, max_message_bytes=1 << 20
    )
    return worker, gateway, await house.channel(gateway)


async def check_idle(worker, gateway):
    """Wait until gateway and worker have nothing of any request left."""
    await wait_idle(gateway)
    await until(lambda: all(task.done() for task in list(worker._tasks.values())))
    assert gateway.num_running == 0


def run_examples(check, strategy, loop, max_examples):
    """Run an asynchronous check on examples, from a thread beside the loop."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(example=strategy)
    def examples(example):
        asyncio.run_coroutine_threadsafe(check(example), loop).result(60)

    examples()


SERVICES = {
    "generate": (inference_pb2_grpc.InferenceServiceStub, "Generate", generates),
    "score": (inference_pb2_grpc.InferenceServiceStub, "Score", scores),
    "vllm": (vllm_engine_pb2_grpc.VllmEngineStub, "Generate", vllm_generates),
}


@pytest.mark.parametrize(
    ("make_stub", "method", "strategy"), SERVICES.values(), ids=SERVICES.keys()
)
async def test_any_request_ends_well_or_with_a_status_that_says_why(
    house, folder, make_stub, method, strategy
):
    worker, gateway, channel = await door(house, folder)
    call = getattr(make_stub(channel), method)
    seen = set()

    async def check(request):
        status = await status_of(call(request, timeout=30))
        assert status is None or status in FINE
        seen.add(status)

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(run_examples, check, strategy, loop, 400)
    assert {None, "INVALID_ARGUMENT"} <= seen
    await check_idle(worker, gateway)


HALF_PAIR = '{"const": "\\ud800"}'
HALF_PAIRS = {
    "latentmesh": (
        inference_pb2_grpc.InferenceServiceStub,
        pb.GenerateRequest(text="a", constraint=pb.Constraint(json_schema=HALF_PAIR)),
    ),
    "vllm": (
        vllm_engine_pb2_grpc.VllmEngineStub,
        vllm.GenerateRequest(
            request_id="a",
            text="a",
            sampling_params=vllm.SamplingParams(temperature=0, json_schema=HALF_PAIR),
        ),
    ),
}


@pytest.mark.parametrize(("make_stub", "request_"), HALF_PAIRS.values(), ids=HALF_PAIRS.keys())
async def test_a_schema_with_half_a_surrogate_pair_is_refused(house, folder, make_stub, request_):
    worker, gateway, channel = await door(house, folder)
    status = await status_of(make_stub(channel).Generate(request_, timeout=30))
    assert status == "INVALID_ARGUMENT"
    await check_idle(worker, gateway)


async def test_any_bytes_are_an_answer_or_an_invalid_request(house, folder):
    worker, gateway, channel = await door(house, folder)
    names = [
        "/latentmesh.v1.InferenceService/Generate",
        "/latentmesh.v1.InferenceService/Score",
        "/vllm.grpc.engine.VllmEngine/Generate",
    ]

    async def check(example):
        name, data = example
        status = await status_of(channel.unary_stream(name)(data, timeout=30))
        assert status is None or status in FINE

    pairs = st.tuples(st.sampled_from(names), st.binary(max_size=60))
    await asyncio.to_thread(run_examples, check, pairs, asyncio.get_running_loop(), 200)
    await check_idle(worker, gateway)


async def test_100_megabytes_are_refused_at_once(house, folder):
    worker, gateway, channel = await door(house, folder)
    call = channel.unary_stream("/latentmesh.v1.InferenceService/Generate")(
        bytes(100 << 20), timeout=60
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught, contextlib.suppress(StopAsyncIteration):
        await anext(aiter(call))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await check_idle(worker, gateway)
