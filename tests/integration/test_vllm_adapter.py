"""vllm.grpc.engine.VllmEngine with the stubs that its own clients use."""

import hashlib
import io
import zipfile

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from cluster.api.gateway_settings import AttentionEndpoint
from model.tokenizer_files import write_tokenizer_files
from tests.fakes.gateway_house import wait_idle
from tests.fakes.text_house import text_gateway
from tests.fakes.waiting import until

pytestmark = pytest.mark.asyncio


class Adapter:
    def __init__(self, worker, gateway, stub):
        self.worker = worker
        self.gateway = gateway
        self.stub = stub

    def generate(self, name="r", ids=(1, 2, 3), *, stream=True, **params):
        request = vllm.GenerateRequest(
            request_id=name,
            tokenized=vllm.TokenizedInput(input_ids=ids),
            stream=stream,
            sampling_params=vllm.SamplingParams(**{"max_tokens": 4, **params}),
        )
        return self.stub.Generate(request, timeout=30)


@pytest.fixture
def start(house, tmp_path):
    write_tokenizer_files(tmp_path)

    async def start_one(**worker_options):
        worker = await house.worker(vocab_size=512, first_token=97, **worker_options)
        endpoints = [AttentionEndpoint(worker.name, worker.address)]
        gateway = await text_gateway(house, endpoints, tmp_path)
        channel = await house.channel(gateway)
        return Adapter(worker, gateway, vllm_engine_pb2_grpc.VllmEngineStub(channel))

    return start_one


@pytest_asyncio.fixture
async def adapter(start):
    return await start()


async def messages_of(call):
    return [message async for message in call]


async def refusal_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (messages_of(call) if hasattr(call, "__aiter__") else call)
    info = error_details_pb2.ErrorInfo()
    rpc_status.from_call(caught.value).details[0].Unpack(info)
    return caught.value.code().name, info.reason, caught.value.details()


async def test_chunks_carry_new_tokens_and_counts_so_far(adapter):
    *chunks, last = await messages_of(adapter.generate())
    num_tokens, token_ids = 0, []
    for message in chunks:
        token_ids += message.chunk.token_ids
        num_tokens += len(message.chunk.token_ids)
        assert message.chunk.completion_tokens == num_tokens
    assert token_ids == [97, 98, 99, 100]
    assert {m.chunk.prompt_tokens for m in chunks} == {3}
    complete = last.complete
    assert list(complete.output_ids) == [97, 98, 99, 100]
    assert (complete.finish_reason, complete.completion_tokens) == ("length", 4)


async def test_without_stream_there_is_only_the_whole_answer(adapter):
    [message] = await messages_of(adapter.generate(stream=False))
    assert list(message.complete.output_ids) == [97, 98, 99, 100]


async def test_each_choice_has_its_index_and_its_end(adapter):
    messages = await messages_of(adapter.generate(n=3))
    parts = {}
    for message in messages:
        if message.WhichOneof("response") == "chunk":
            parts.setdefault(message.chunk.index, []).extend(message.chunk.token_ids)
    ends = [m.complete for m in messages if m.WhichOneof("response") == "complete"]
    assert {end.index: list(end.output_ids) for end in ends} == parts
    assert sorted(parts) == [0, 1, 2]


async def test_what_stopped_an_answer_is_told(adapter):
    *_, by_text = await messages_of(adapter.generate("a", stop=["c"], max_tokens=9))
    assert (by_text.complete.finish_reason, by_text.complete.matched_stop_str) == ("stop", "c")
    *_, by_token = await messages_of(adapter.generate("b", stop_token_ids=[99], max_tokens=9))
    assert (by_token.complete.finish_reason, by_token.complete.matched_token_id) == ("stop", 99)


async def test_zero_means_unset_and_an_unset_temperature_is_one(adapter):
    await messages_of(adapter.generate(top_p=0, top_k=0, repetition_penalty=0, n=0))
    submit = await adapter.worker.submitted.get()
    assert submit.num_choices == 1
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.repetition_penalty == 1.0


async def test_logprobs_come_with_their_tokens(adapter):
    *chunks, last = await messages_of(adapter.generate(logprobs=2, prompt_logprobs=1))
    first = next(m.chunk for m in chunks if m.chunk.HasField("input_logprobs"))
    values = first.input_logprobs.token_logprobs
    assert len(values) == 3
    assert not values[0].HasField("value")
    assert len(last.complete.output_logprobs.token_logprobs) == 4


async def test_an_abort_ends_the_stream_and_stops_the_worker(start):
    adapter = await start(is_manual=True)
    call = adapter.generate("mine", max_tokens=100)
    submit = await adapter.worker.submitted.get()
    await adapter.worker.send_tokens(submit, [97])
    first = await anext(aiter(call))
    assert list(first.chunk.token_ids) == [97]
    await adapter.stub.Abort(vllm.AbortRequest(request_ids=["mine", "unknown"]), timeout=10)
    [last] = await messages_of(call)
    assert (last.complete.finish_reason, list(last.complete.output_ids)) == ("abort", [97])
    assert (await adapter.worker.cancelled.get()).request_id == submit.request_id
    await wait_idle(adapter.gateway)


async def test_an_abort_before_the_first_token_ends_the_request(start):
    adapter = await start(is_manual=True)
    call = adapter.generate("mine")
    await adapter.worker.submitted.get()
    await adapter.stub.Abort(vllm.AbortRequest(request_ids=["mine"]), timeout=10)
    [last] = await messages_of(call)
    assert last.complete.finish_reason == "abort"
    await adapter.worker.cancelled.get()
    await wait_idle(adapter.gateway)


async def test_an_abort_reaches_a_request_whose_client_does_not_read(start):
    adapter = await start(burst=64, max_request_tokens=4000)
    call = adapter.generate("slow", max_tokens=1900, ignore_eos=True, logprobs=20)
    await anext(aiter(call))
    await until(lambda: adapter.worker.is_starved)
    await adapter.stub.Abort(vllm.AbortRequest(request_ids=["slow"]), timeout=10)
    await adapter.worker.cancelled.get()
    *_, last = await messages_of(call)
    assert last.complete.finish_reason == "abort"
    await wait_idle(adapter.gateway)


@pytest.mark.parametrize(
    ("limit", "expected"), [(2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3]), (-1, [1, 2, 3])]
)
async def test_a_prompt_is_cut_at_its_begin(adapter, limit, expected):
    await messages_of(adapter.generate(truncate_prompt_tokens=limit))
    assert (await adapter.worker.submitted.get()).token_ids == expected


async def test_a_client_that_leaves_stops_the_worker(start):
    adapter = await start(is_manual=True)
    call = adapter.generate()
    await adapter.worker.submitted.get()
    call.cancel()
    await adapter.worker.cancelled.get()
    await wait_idle(adapter.gateway)


async def test_the_name_of_a_running_request_cannot_be_used_again(start):
    adapter = await start(is_manual=True)
    running = adapter.generate("same")
    submit = await adapter.worker.submitted.get()
    code, reason, text = await refusal_of(adapter.generate("same"))
    assert (code, reason) == ("INVALID_ARGUMENT", "REQUEST_INVALID")
    assert "same" in text
    await adapter.worker.send_end(submit)
    await messages_of(running)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        pytest.param({"kv_transfer_params_json": "{}"}, "kv_transfer", id="transfer"),
        pytest.param({"data_parallel_rank": 1}, "data_parallel_rank", id="rank"),
        pytest.param({"mm_inputs": vllm.MultimodalInputs()}, "mm_inputs", id="media"),
        pytest.param(
            {"sampling_params": vllm.SamplingParams(structural_tag="{}")},
            "structural_tag",
            id="tag",
        ),
        pytest.param({"sampling_params": vllm.SamplingParams(logprobs=-1)}, "logprobs", id="all"),
        pytest.param({"request_id": ""}, "request_id", id="no name"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(adapter, fields, word):
    values = {"request_id": "r", "tokenized": vllm.TokenizedInput(input_ids=[1]), **fields}
    code, _, text = await refusal_of(adapter.stub.Generate(vllm.GenerateRequest(**values)))
    assert code == "INVALID_ARGUMENT"
    assert word in text


async def test_other_methods_say_that_they_are_not_offered(adapter):
    stub = adapter.stub
    for call in (
        stub.Embed(vllm.EmbedRequest()),
        stub.StartProfile(common_pb2.StartProfileRequest()),
        stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()),
    ):
        assert (await refusal_of(call))[:2] == ("UNIMPLEMENTED", "UNSUPPORTED")


async def test_health_follows_the_gateway(adapter):
    assert (await adapter.stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    await adapter.gateway.drain()
    assert not (await adapter.stub.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_model_server_and_load_are_described(adapter):
    model = await adapter.stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (model.served_model_name, model.vocab_size, model.is_generation) == ("k3", 512, True)
    server = await adapter.stub.GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.server_type, server.active_requests) == ("vllm-grpc", 0)
    loads = await adapter.stub.GetLoads(vllm.GetLoadsRequest())
    assert loads.dp_rank_count == 1
    code, _, _ = await refusal_of(adapter.stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1)))
    assert code == "INVALID_ARGUMENT"


async def test_the_tokenizer_comes_as_a_zip_with_its_fingerprint(adapter):
    chunks = await messages_of(adapter.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    assert {"tiktoken.model", "tokenizer_config.json"} <= set(names)


async def test_flushing_says_how_much_was_forgotten(adapter):
    adapter.worker.num_snapshots = 3
    answer = await adapter.stub.FlushCache(common_pb2.FlushCacheRequest())
    assert (answer.success, answer.message) == (True, "forgot 3 cached prefixes")


async def test_flushing_names_the_workers_that_did_not_answer(adapter):
    adapter.worker.num_snapshots = None
    call = adapter.stub.FlushCache(common_pb2.FlushCacheRequest())
    await adapter.worker.flushed.get()
    adapter.worker.drop_connections()
    answer = await call
    assert not answer.success
    assert "attention-0" in answer.message
