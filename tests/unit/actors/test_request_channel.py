"""Messages between gateway and attention worker as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.request_channel import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    Cancel,
    Credit,
    Ended,
    LogitRows,
    NewTokens,
    Sampling,
    StepReport,
    Submit,
    Usage,
    Welcome,
    decode_length,
    decode_to_gateway,
    decode_to_worker,
    encode_message,
)
from configs.errors import FrameError
from configs.numerics import EndReason, FinishReason

TO_WORKER = {
    "submit": Submit(
        request_id="g-1",
        attempt=2,
        token_ids=[1, 2],
        max_tokens=3,
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=(1 << 64) - 1),
        stop_token_ids=[7],
        timeout_s=1.5,
        credit_tokens=9,
        want_logits=True,
        generated_ids=[5],
    ),
    "cancel": Cancel("g-1", 2),
    "credit": Credit("g-1", 2, 64),
}
TO_GATEWAY = {
    "welcome": Welcome("attention-0", 1, 4096),
    "step": StepReport(
        step=7,
        tokens=[NewTokens("g-1", 0, [3, 4])],
        logits=[LogitRows("g-2", 0, 16, 1, b"\x00\x01")],
        ended=[
            Ended("g-1", 0, EndReason.FINISHED, Usage(2, 2, 2), FinishReason.STOP),
            Ended("g-3", 1, EndReason.REJECTED, Usage(), None, "OVERLOADED", "try later"),
        ],
    ),
}


@pytest.mark.parametrize("message", TO_WORKER.values(), ids=TO_WORKER)
def test_messages_to_a_worker_survive_the_wire(message) -> None:
    data = encode_message(message)
    assert decode_length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    assert decode_to_worker(data[LENGTH_BYTES:]) == message


@pytest.mark.parametrize("message", TO_GATEWAY.values(), ids=TO_GATEWAY)
def test_messages_to_a_gateway_survive_the_wire(message) -> None:
    assert decode_to_gateway(encode_message(message)[LENGTH_BYTES:]) == message


@pytest.mark.parametrize("decode", [decode_to_worker, decode_to_gateway], ids=["worker", "gateway"])
@given(body=st.binary(max_size=200))
def test_other_bytes_are_a_frame_error_or_a_message(decode, body: bytes) -> None:
    try:
        message = decode(body)
    except FrameError:
        return
    assert encode_message(message)


def test_a_message_of_the_other_direction_is_a_frame_error() -> None:
    body = encode_message(TO_GATEWAY["welcome"])[LENGTH_BYTES:]
    with pytest.raises(FrameError, match="not a request-channel message"):
        decode_to_worker(body)


def test_a_length_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(FrameError, match="exceeds"):
        decode_length((MAX_MESSAGE_BYTES + 1).to_bytes(LENGTH_BYTES, "little"))


def test_a_message_over_the_limit_is_refused_by_its_sender() -> None:
    rows = LogitRows("g-1", 0, 0, 1, bytes(MAX_MESSAGE_BYTES))
    with pytest.raises(FrameError, match="exceeds"):
        encode_message(StepReport(1, logits=[rows]))
