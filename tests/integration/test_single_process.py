"""The whole path on a checkpoint with known answers: engine, decoder, router, transport, experts.

The logits and the 64 greedy tokens of the golden files come from an independent implementation.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from actors.engine.request import RequestKey
from actors.request_channel import Cancel, Credit, Sampling, Submit
from actors.single_process import SingleProcess, SingleProcessSettings, loaded_bytes
from configs.errors import InvalidRequestError, RequestTooLargeError
from configs.ids import RequestId
from configs.numerics import EndReason, FinishReason, FloatType, Numerics
from model.checkpoint import Checkpoint
from tests.fakes.mini_cluster import GATEWAY, MiniAttention, mini_cluster

TOLERANCE = {"mini": 1e-3, "mini-mxfp4": 5e-3}


@pytest.fixture(scope="module", params=["mini", "mini-mxfp4"])
def golden_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def golden(golden_dir: Path, golden_name: str) -> dict[str, np.ndarray]:
    with np.load(golden_dir / golden_name / "golden.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def checkpoint(golden_dir: Path, golden_name: str) -> Checkpoint:
    return Checkpoint.open(golden_dir / golden_name)


@pytest.fixture(scope="module")
def mini(golden_dir: Path) -> Checkpoint:
    return Checkpoint.open(golden_dir / "mini")


@pytest.fixture(scope="module")
def mini_golden(golden_dir: Path) -> dict[str, np.ndarray]:
    with np.load(golden_dir / "mini" / "golden.npz") as data:
        return dict(data)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A folder whose path leaves room for socket names."""
    path = Path(tempfile.mkdtemp(prefix="lmt-"))
    yield path
    shutil.rmtree(path)


def request(name: str, prompt: list[int], max_tokens: int, **changes: object) -> Submit:
    values: dict[str, object] = {"sampling": Sampling(), "stop_token_ids": []}
    return Submit(RequestId(name), 0, prompt, max_tokens, **{**values, **changes})


def key(name: str) -> RequestKey:
    return RequestKey(RequestId(name), 0)


def send(attention: MiniAttention, message: Submit | Credit) -> None:
    attention.worker.handle(GATEWAY, message)


def logits_of(attention: MiniAttention, name: str) -> np.ndarray:
    rows = [rows for r in attention.sink.reports for rows in r.logits if rows.request_id == name]
    assert [r.first_position for r in rows] == list(
        np.cumsum([0, *[r.num_rows for r in rows]])[:-1]
    )
    data = np.frombuffer(b"".join(r.data for r in rows), "<f4")
    return data.reshape(sum(r.num_rows for r in rows), -1)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_scores_and_greedy_tokens_are_the_golden_ones(
    checkpoint: Checkpoint, golden: dict, golden_name: str, numerics: Numerics
) -> None:
    prompt = golden["tokens"].tolist()
    with SingleProcess(checkpoint, SingleProcessSettings(numerics=numerics)) as single:
        logits = single.score(prompt)
        seen: list[int] = []
        answer = single.generate(prompt, max_tokens=64, stop_token_ids=[], on_token=seen.append)
    assert (logits.shape, logits.dtype) == (golden["logits"].shape, np.float32)
    assert np.abs(logits - golden["logits"]).max() < TOLERANCE[golden_name]
    assert list(answer.token_ids) == golden["greedy"].tolist()
    assert (tuple(seen), answer.finish_reason) == (answer.token_ids, FinishReason.LENGTH)
    assert answer.usage.output_tokens == 64


@pytest.mark.parametrize("max_step_tokens", [16, 48])
def test_chunked_prefill_gives_the_golden_tokens(
    mini: Checkpoint, mini_golden: dict, max_step_tokens: int
) -> None:
    settings = SingleProcessSettings(max_step_tokens=max_step_tokens, block_tokens=16)
    with SingleProcess(mini, settings) as single:
        answer = single.generate(mini_golden["tokens"].tolist(), max_tokens=16, stop_token_ids=[])
        logits = single.score(mini_golden["tokens"].tolist())
    assert list(answer.token_ids) == mini_golden["greedy"][:16].tolist()
    assert np.abs(logits - mini_golden["logits"]).max() < TOLERANCE["mini"]


def test_invariant_logits_are_bit_equal_for_every_chunk_split(
    mini: Checkpoint, mini_golden: dict
) -> None:
    results = []
    for max_step_tokens in (16, 32, 512):
        settings = SingleProcessSettings(
            numerics=Numerics.INVARIANT, max_step_tokens=max_step_tokens
        )
        with SingleProcess(mini, settings) as single:
            results.append(single.score(mini_golden["tokens"].tolist()))
    assert all(np.array_equal(results[0], result) for result in results[1:])


def test_a_stop_token_of_the_model_ends_the_answer(mini: Checkpoint, mini_golden: dict) -> None:
    greedy = mini_golden["greedy"].tolist()
    stop = greedy[3]
    with SingleProcess(mini, SingleProcessSettings()) as single:
        answer = single.generate(
            mini_golden["tokens"].tolist(), max_tokens=64, stop_token_ids=[stop]
        )
    assert list(answer.token_ids) == greedy[: greedy.index(stop) + 1]
    assert answer.finish_reason is FinishReason.STOP


def test_bad_input_is_a_typed_error_and_the_process_goes_on(
    mini: Checkpoint, mini_golden: dict
) -> None:
    with SingleProcess(mini, SingleProcessSettings(max_request_tokens=128)) as single:
        with pytest.raises(InvalidRequestError, match="token ids of this model are 0 to 319"):
            single.generate([1, 320], max_tokens=1)
        with pytest.raises(InvalidRequestError, match="token_ids is empty"):
            single.score([])
        with pytest.raises(InvalidRequestError, match="max_tokens is 0"):
            single.generate([1], max_tokens=0)
        with pytest.raises(RequestTooLargeError, match="129 tokens"):
            single.generate([1] * 100, max_tokens=29)
        answer = single.generate(mini_golden["tokens"].tolist(), max_tokens=2, stop_token_ids=[])
    assert list(answer.token_ids) == mini_golden["greedy"][:2].tolist()


def test_an_answer_that_its_reader_abandons_leaves_nothing_behind(
    mini: Checkpoint, mini_golden: dict
) -> None:
    def refuse(_token: int) -> None:
        raise KeyboardInterrupt

    with SingleProcess(mini, SingleProcessSettings()) as single:
        with pytest.raises(KeyboardInterrupt):
            single.generate([1, 2, 3], max_tokens=50, on_token=refuse)
        answer = single.generate(mini_golden["tokens"].tolist(), max_tokens=2, stop_token_ids=[])
    assert list(answer.token_ids) == mini_golden["greedy"][:2].tolist()


def test_loading_reports_every_byte(checkpoint: Checkpoint) -> None:
    class Counted:
        num_bytes = 0

        def advance(self, num_bytes: int) -> None:
            self.num_bytes += num_bytes

    counted = Counted()
    with SingleProcess(checkpoint, SingleProcessSettings(), progress=counted):
        pass
    assert counted.num_bytes == loaded_bytes(checkpoint, SingleProcessSettings())


def test_bfloat16_computes_and_halves_the_latent_bytes(mini: Checkpoint) -> None:
    settings = SingleProcessSettings(
        compute_dtype=FloatType.BFLOAT16, wire_dtype=FloatType.BFLOAT16
    )
    with (
        SingleProcess(mini, settings) as half,
        SingleProcess(mini, SingleProcessSettings()) as full,
    ):
        assert np.isfinite(half.score([1, 2, 3])).all()
        full.score([1, 2, 3])
        assert half.counters.latent_bytes_out * 2 == full.counters.latent_bytes_out


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
@pytest.mark.parametrize(("num_attention", "num_experts"), [(1, 2), (2, 3), (3, 1)])
def test_any_number_of_workers_gives_the_golden_tokens(
    mini: Checkpoint,
    mini_golden: dict,
    directory: Path,
    num_attention: int,
    num_experts: int,
    transport: str,
) -> None:
    num_tokens = 64 if num_attention == 1 else 20
    prompt, greedy = mini_golden["tokens"].tolist(), mini_golden["greedy"][:num_tokens].tolist()
    with mini_cluster(
        mini,
        num_attention=num_attention,
        num_experts=num_experts,
        transport=transport,
        directory=directory,
    ) as cluster:
        for attention in cluster.attention:
            send(attention, request("golden", prompt, num_tokens))
            send(attention, request("other", prompt[:21], 8))
        for attention in cluster.attention:
            assert attention.sink.wait_for_end(key("golden")).reason is EndReason.FINISHED
            attention.sink.wait_for_end(key("other"))
            assert attention.sink.tokens(key("golden")) == greedy
            attention.assert_memory_is_free()
        assert all(expert.worker.stats.pairs > 0 for expert in cluster.experts)


@pytest.mark.parametrize(
    ("num_attention", "num_experts", "budget"),
    [(1, 1, 16), (2, 3, 32), (1, 5, 64)],
    ids=["1x1", "2x3", "1x5"],
)
def test_invariant_logits_do_not_depend_on_company_or_workers(
    mini: Checkpoint,
    mini_golden: dict,
    directory: Path,
    num_attention: int,
    num_experts: int,
    budget: int,
) -> None:
    prompt = mini_golden["tokens"].tolist()
    with SingleProcess(mini, SingleProcessSettings(numerics=Numerics.INVARIANT)) as single:
        alone = single.score(prompt)
        expected = single.generate(prompt, max_tokens=8, stop_token_ids=[]).token_ids
    with mini_cluster(
        mini,
        num_attention=num_attention,
        num_experts=num_experts,
        transport="local",
        directory=directory,
        numerics=Numerics.INVARIANT,
        max_step_tokens=budget,
    ) as cluster:
        for attention in cluster.attention:
            for number in range(3):
                send(attention, request(f"o{number}", prompt[number : 20 + 9 * number], 6))
            send(attention, request("s", prompt, 0, want_logits=True))
            send(attention, request("g", prompt, 8))
        for attention in cluster.attention:
            attention.sink.wait_for_end(key("g"))
            attention.sink.wait_for_end(key("s"))
            assert np.array_equal(logits_of(attention, "s"), alone)
            assert attention.sink.tokens(key("g")) == list(expected)


def test_a_score_that_waits_for_credit_holds_up_nobody_and_gives_equal_logits(
    mini: Checkpoint, mini_golden: dict, directory: Path
) -> None:
    prompt = mini_golden["tokens"].tolist()
    with SingleProcess(mini, SingleProcessSettings(numerics=Numerics.INVARIANT)) as single:
        alone = single.score(prompt)
    with mini_cluster(
        mini,
        num_attention=1,
        num_experts=1,
        transport="local",
        directory=directory,
        numerics=Numerics.INVARIANT,
    ) as cluster:
        [attention] = cluster.attention
        send(attention, request("s", prompt, 0, want_logits=True, credit_tokens=16))
        send(attention, request("g", prompt, 8))
        attention.sink.wait_for_end(key("g"))
        assert len(logits_of(attention, "s")) == 16
        for _ in range(len(prompt) // 16):
            send(attention, Credit(key("s").request_id, key("s").attempt, 16))
        attention.sink.wait_for_end(key("s"))
        assert np.array_equal(logits_of(attention, "s"), alone)


def test_a_replayed_attempt_goes_on_with_equal_tokens(
    mini: Checkpoint, mini_golden: dict, directory: Path
) -> None:
    prompt, greedy = mini_golden["tokens"].tolist(), mini_golden["greedy"][:24].tolist()
    with mini_cluster(
        mini,
        num_attention=1,
        num_experts=1,
        transport="local",
        directory=directory,
        numerics=Numerics.INVARIANT,
    ) as cluster:
        [attention] = cluster.attention
        send(attention, request("r", prompt, 24, generated_ids=greedy[:18]))
        attention.sink.wait_for_end(key("r"))
        assert attention.sink.tokens(key("r")) == greedy[18:]


@pytest.mark.parametrize("how", ["cancel", "deadline", "vanish"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "paused"])
def test_a_request_that_is_left_in_any_phase_frees_its_memory(
    mini: Checkpoint, mini_golden: dict, directory: Path, phase: str, how: str
) -> None:
    prompt = (mini_golden["tokens"].tolist() * 6)[:400]
    with mini_cluster(
        mini,
        num_attention=1,
        num_experts=1,
        transport="local",
        directory=directory,
        max_step_tokens=16,
        num_state_slots=1,
        num_blocks=32,
    ) as cluster:
        [attention] = cluster.attention
        is_paused = phase in ("queued", "paused")
        if phase == "queued":  # It waits behind a request that holds the only slot.
            send(attention, request("first", [1], 100, credit_tokens=1))
            attention.sink.wait_for_tokens(key("first"), 1)
        length = 400 if phase == "prefill" else 5
        message = request(
            "r",
            prompt[:length],
            100,
            credit_tokens=2 if is_paused else 50,  # Less than max_tokens: it cannot finish.
            timeout_s=0.2 if how == "deadline" else None,
        )
        send(attention, message)
        if phase in ("decode", "paused") and how != "deadline":
            attention.sink.wait_for_tokens(key("r"), 2)
        elif phase == "prefill":
            assert attention.stats().num_running <= 1
        leave(attention, how)
        if how != "vanish":
            wanted = EndReason.CANCELLED if how == "cancel" else EndReason.DEADLINE
            assert attention.sink.wait_for_end(key("r")).reason is wanted
        attention.worker.disconnect(GATEWAY)
        attention.assert_memory_is_free()


def leave(attention: MiniAttention, how: str) -> None:
    if how == "cancel":
        attention.worker.handle(GATEWAY, Cancel(RequestId("r"), 0))
    elif how == "vanish":
        attention.worker.disconnect(GATEWAY)


def test_a_lost_expert_worker_fails_its_requests_and_frees_their_memory(
    mini: Checkpoint, mini_golden: dict, directory: Path
) -> None:
    with mini_cluster(
        mini, num_attention=1, num_experts=2, transport="tcp", directory=directory
    ) as cluster:
        [attention] = cluster.attention
        send(attention, request("r", mini_golden["tokens"].tolist(), 400, credit_tokens=2))
        attention.sink.wait_for_tokens(key("r"), 2)
        cluster.experts[0].end()
        attention.worker.handle(GATEWAY, Credit(RequestId("r"), 0, 300))
        end = attention.sink.wait_for_end(key("r"))
        assert (end.reason, end.error_code) == (EndReason.FAILED, "WORKER_FAILED")
        send(attention, request("next", mini_golden["tokens"].tolist(), 4))
        end = attention.sink.wait_for_end(key("next"))
        assert (end.reason, end.error_code) == (EndReason.FAILED, "WORKER_FAILED")
        attention.assert_memory_is_free()
