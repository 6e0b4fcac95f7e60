"""Several answers to one prompt, stop texts, log-probabilities and constraints at the gateway."""

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from actors.request_channel import Cancel, Submit, choice_id
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.request_stream import CREDIT_TOKENS
from configs import errors
from configs.numerics import EndReason, FinishReason
from model.tokenizer_files import special_id, write_tokenizer_files
from tests.fakes.fake_attention_worker import choice_of, logprobs_of
from tests.fakes.gateway_house import ask, ended, error_of, wait_idle

pytestmark = pytest.mark.asyncio
END = special_id("<|end_of_msg|>")


class Answer:
    """All that came of one choice."""

    def __init__(self):
        self.token_ids = []
        self.text = ""
        self.logprobs = []
        self.finished = None


async def answers_of(call, num_choices=1):
    """Everything that a stream brings, by choice."""
    answers = [Answer() for _ in range(num_choices)]
    async for response in call:
        event = response.chunk if response.HasField("chunk") else response.finished
        answer = answers[event.choice]
        assert answer.finished is None
        if response.HasField("finished"):
            answer.finished = event
            continue
        answer.token_ids.extend(event.token_ids)
        answer.text += event.text
        answer.logprobs.extend(event.logprobs)
    assert all(answer.finished is not None for answer in answers)
    return answers


@pytest_asyncio.fixture
async def text_house(house, tmp_path):
    write_tokenizer_files(tmp_path)

    async def start(**worker_options):
        worker = await house.worker(vocab_size=512, **worker_options)
        gateway = await house.gateway(
            worker, vocab_size=512, tokenizer_folder=tmp_path, eos_token_ids=(END,)
        )
        return worker, gateway, await house.stub(gateway)

    return start


async def test_choices_are_one_submission_and_each_ends_once(house):
    worker, gateway, stub = await house.simple()
    answers = await answers_of(stub.Generate(ask(max_tokens=20, num_choices=3)), 3)
    for choice, answer in enumerate(answers):
        assert answer.token_ids == list(range(10 + choice, 30 + choice))
        assert answer.finished.usage.output_tokens == 20
    (submit,) = [message for message in worker.received if isinstance(message, Submit)]
    assert submit.num_choices == 3
    assert answers[2].finished.request_id == choice_id(submit.request_id, 2)
    await wait_idle(gateway)
    assert ended(gateway, "finished") == 3


async def test_choices_longer_than_the_credit_are_complete(house):
    _, _, stub = await house.simple(burst=50)
    request = ask(max_tokens=700, ignore_eos=True, num_choices=3)
    for choice, answer in enumerate(await answers_of(stub.Generate(request), 3)):
        assert answer.token_ids == [(10 + choice + index) % 64 for index in range(700)]


async def test_slow_reader_keeps_every_choice_within_its_credit(house):
    num_tokens = 40_000
    worker = await house.worker(burst=64, vocab_size=160_000, max_request_tokens=200_000)
    gateway = await house.gateway(worker, vocab_size=160_000, context_tokens=200_000)
    reader = await house.stub(gateway, **{"grpc.http2.bdp_probe": 0})
    clock = await house.stub(gateway)
    call = reader.Generate(ask(max_tokens=num_tokens, ignore_eos=True, num_choices=3))
    await worker.submitted.get()
    credit, num_turns = -1, 0
    while num_turns < 5:
        now = sum(worker._credit.values())
        num_turns = num_turns + 1 if now == credit else 0
        credit = now
        for _ in range(10):
            await clock.GetTopology(pb.GetTopologyRequest())
    assert credit < 3 * num_tokens
    streams = gateway._router._running
    assert len(streams) == 3
    assert all(len(stream._news.token_ids) <= CREDIT_TOKENS for stream in streams)
    for choice, answer in enumerate(await answers_of(call, 3)):
        expected = [(10 + choice + index) % 160_000 for index in range(num_tokens)]
        assert answer.token_ids == expected


async def test_client_that_leaves_cancels_every_choice(house):
    worker, gateway, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask(num_choices=3))
    submit = await worker.submitted.get()
    await worker.send_tokens(choice_of(submit, 1), [5])
    await call.read()
    call.cancel()
    cancelled = {(await worker.cancelled.get()).request_id for _ in range(3)}
    assert cancelled == {choice_id(submit.request_id, choice) for choice in range(3)}
    await wait_idle(gateway)
    assert ended(gateway, "cancelled") == 3


async def test_choice_that_fails_fails_the_call_and_cancels_the_others(house):
    worker, gateway, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask(num_choices=3))
    submit = await worker.submitted.get()
    await worker.send_end(
        choice_of(submit, 1), EndReason.FAILED, error_code="WORKER_FAILED", error_message="broken"
    )
    error, _ = await error_of(call)
    assert (type(error), error.message) == (errors.WorkerError, "broken")
    cancelled = {(await worker.cancelled.get()).request_id for _ in range(2)}
    assert cancelled == {choice_id(submit.request_id, choice) for choice in (0, 2)}
    await wait_idle(gateway)
    assert (ended(gateway, "failed"), ended(gateway, "cancelled")) == (1, 2)


async def test_choice_that_ends_early_leaves_the_others_running(house):
    worker, _, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask(num_choices=2))
    submit = await worker.submitted.get()
    await worker.send_end(choice_of(submit, 0))
    assert (await call.read()).finished.choice == 0
    await worker.send_tokens(choice_of(submit, 1), [7])
    assert list((await call.read()).chunk.token_ids) == [7]
    await worker.send_end(choice_of(submit, 1))
    assert (await call.read()).finished.choice == 1
    assert await call.read() is grpc.aio.EOF


async def test_every_choice_counts_as_a_running_request(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, max_running_requests=4)
    stub = await house.stub(gateway)
    first = stub.Generate(ask(num_choices=3))
    await worker.submitted.get()
    error, _ = await error_of(stub.Generate(ask(num_choices=2)))
    assert type(error) is errors.OverloadedError
    first.cancel()
    await wait_idle(gateway)


async def test_more_choices_than_a_gateway_ever_carries_are_invalid(house):
    gateway = await house.gateway(await house.worker(), max_running_requests=4)
    error, _ = await error_of((await house.stub(gateway)).Generate(ask(num_choices=5)))
    assert type(error) is errors.InvalidRequestError
    assert "num_choices is 5" in error.message


async def test_log_probabilities_come_with_their_tokens_and_those_of_the_prompt_first(house):
    _, _, stub = await house.simple(burst=3)
    request = ask(8, 9, 11, max_tokens=5, logprobs=2, prompt_logprobs=1, num_choices=2)
    answers = [Answer(), Answer()]
    prompt = []
    async for response in stub.Generate(request):
        chunk = response.chunk
        if chunk.prompt_logprobs:
            assert not answers[0].token_ids
            assert not answers[1].token_ids
            assert chunk.prompt_position == len(prompt) + 1
            prompt.extend(chunk.prompt_logprobs)
        assert len(chunk.logprobs) == len(chunk.token_ids)
        answers[chunk.choice].token_ids.extend(chunk.token_ids)
        answers[chunk.choice].logprobs.extend(chunk.logprobs)
    assert [entry.logprob for entry in prompt] == [-9 / 8, -11 / 8]
    for answer in answers:
        said = [logprobs_of(token, 2) for token in answer.token_ids]
        assert [list(entry.top_ids) for entry in answer.logprobs] == [s.top_ids for s in said]
        assert [entry.logprob for entry in answer.logprobs] == [s.logprob for s in said]


@pytest.mark.parametrize("burst", [1, 2, 5, 50])
async def test_stop_text_ends_the_answer_whatever_the_steps_are(text_house, burst):
    _, gateway, stub = await text_house(burst=burst, answers=[b"one two STOP three "])
    (answer,) = await answers_of(stub.Generate(ask(max_tokens=200, stop=["STOP", "never"])))
    assert answer.text == "one two "
    assert answer.token_ids == list(b"one two STOP")
    assert answer.finished.finish_reason == pb.FINISH_REASON_STOP
    assert answer.finished.stop_text == "STOP"
    assert answer.finished.usage.output_tokens == 12
    await wait_idle(gateway)
    assert ended(gateway, "finished") == 1
    assert gateway.metrics.value("latentmesh_answers_finished_total", cause="stop_text") == 1


async def test_stop_text_cancels_the_request_at_its_worker(text_house):
    worker, gateway, stub = await text_house(is_manual=True)
    call = stub.Generate(ask(stop=["!"]))
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, b"hi!")
    assert await worker.cancelled.get() == Cancel(submit.request_id, submit.attempt)
    (answer,) = await answers_of(call)
    assert (answer.text, answer.finished.stop_text) == ("hi", "!")
    await wait_idle(gateway)
    assert ended(gateway, "finished") == 1
    assert ended(gateway, "cancelled") == 0


async def test_worker_that_is_lost_after_a_stop_text_costs_nothing(text_house):
    worker, _, stub = await text_house(is_manual=True)
    call = stub.Generate(ask(stop=["!"]))
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, b"hi!")
    worker.drop_connections()
    (answer,) = await answers_of(call)
    assert (answer.text, answer.finished.finish_reason) == ("hi", pb.FINISH_REASON_STOP)


async def test_text_that_may_become_a_stop_text_is_held_back_with_its_ids(text_house):
    worker, _, stub = await text_house(is_manual=True)
    call = stub.Generate(ask(stop=["STOP"]))
    submit = await worker.submitted.get()
    await worker.send_tokens(submit, b"aST")
    chunk = (await call.read()).chunk
    assert (chunk.text, list(chunk.token_ids)) == ("a", [ord("a")])
    await worker.send_tokens(submit, b"x")
    chunk = (await call.read()).chunk
    assert (chunk.text, list(chunk.token_ids)) == ("STx", list(b"STx"))
    call.cancel()


async def test_each_choice_has_its_own_stop(text_house):
    _, _, stub = await text_house(answers=[b"aa!bb ", b"cccc!", b"no end "])
    request = ask(max_tokens=9, stop=["!"], num_choices=3)
    answers = await answers_of(stub.Generate(request), 3)
    assert [answer.text for answer in answers] == ["aa", "cccc", "no end no"]
    reasons = [answer.finished.finish_reason for answer in answers]
    stop = pb.FINISH_REASON_STOP
    assert reasons == [stop, stop, pb.FINISH_REASON_LENGTH]


async def test_stop_text_is_kept_when_it_is_asked_for(text_house):
    _, _, stub = await text_house(answers=[b"ab!c"])
    request = ask(max_tokens=9, stop=["!"], include_stop_text=True)
    assert (await answers_of(stub.Generate(request)))[0].text == "ab!"


async def test_matched_stop_token_is_reported(house):
    _, gateway, stub = await house.simple()
    (answer,) = await answers_of(stub.Generate(ask(max_tokens=20, stop_token_ids=[12])))
    assert gateway.metrics.value("latentmesh_answers_finished_total", cause="stop_token") == 1
    assert answer.finished.WhichOneof("matched_stop") == "stop_token_id"
    assert answer.finished.stop_token_id == 12


async def test_answer_whose_constraint_is_complete_has_no_matched_stop(text_house):
    worker, gateway, stub = await text_house(is_manual=True)
    constraint = pb.Constraint(regex="ab")
    call = stub.Generate(ask(constraint=constraint, ignore_eos=True))
    submit = await worker.submitted.get()
    assert submit.grammar
    await worker.send_tokens(submit, b"ab")
    await worker.send_end(submit, finish_reason=FinishReason.STOP)
    (answer,) = await answers_of(call)
    assert answer.finished.WhichOneof("matched_stop") is None
    assert gateway.metrics.value("latentmesh_answers_finished_total", cause="constraint") == 1


@pytest.mark.parametrize(
    "constraint",
    [
        pytest.param(pb.Constraint(json_schema="{"), id="no JSON"),
        pytest.param(pb.Constraint(json_schema='{"type": "colour"}'), id="no schema"),
        pytest.param(pb.Constraint(regex="(a"), id="regex"),
        pytest.param(pb.Constraint(grammar="start: ("), id="grammar"),
        pytest.param(pb.Constraint(choices=pb.Choices()), id="no choices"),
    ],
)
async def test_bad_constraint_is_refused_before_a_worker_sees_it(text_house, constraint):
    worker, _, stub = await text_house()
    error, _ = await error_of(stub.Generate(ask(constraint=constraint)))
    assert type(error) is errors.InvalidRequestError
    assert worker.received == []


async def test_ten_thousand_stop_texts_are_refused(text_house):
    worker, _, stub = await text_house()
    error, _ = await error_of(stub.Generate(ask(stop=["x"] * 10_000)))
    assert type(error) is errors.InvalidRequestError
    assert "stop has 10000 entries" in error.message
    assert worker.received == []


async def test_worker_is_told_every_sampling_field(house):
    worker, _, stub = await house.simple()
    sampling = pb.SamplingParams(
        temperature=0.5, top_p=0.25, top_k=9, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={3: -100.0}, seed=4,
    )  # fmt: skip
    await answers_of(stub.Generate(ask(max_tokens=2, min_tokens=1, sampling=sampling)))
    told = (await worker.submitted.get()).sampling
    assert (told.temperature, told.top_p, told.top_k, told.min_p) == (0.5, 0.25, 9, 0.125)
    penalties = (told.repetition_penalty, told.presence_penalty, told.frequency_penalty)
    assert penalties == (1.5, 0.5, -0.5)
    assert (told.logit_bias, told.min_tokens, told.seed) == ({3: -100.0}, 1, 4)
