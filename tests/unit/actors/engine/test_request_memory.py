"""What requests have in memory: copies that fit and copies that do not, and the longest start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from actors.engine.admission import SnapshotLimits
from actors.engine.request_memory import RequestMemory
from actors.engine.request_snapshot import RequestSnapshot
from actors.request_channel import Submit
from configs.errors import InvariantError
from configs.numerics import EndReason
from model.cache import SlotCopy
from tests.fakes.engine_rig import ALWAYS_COPY, VOCAB, EngineRig, key, limits, score, submit
from tests.fakes.fake_decoder import expected_tokens, fake_memory

KEPT = SnapshotLimits(max_bytes=10_000, interval_tokens=16, min_gain_tokens=1)
PROMPT = [(3 * position) % VOCAB for position in range(40)]
NUM_ANSWER = 20


def rig_of(**changes: Any) -> EngineRig:
    return EngineRig(limits(**{"snapshots": KEPT} | changes), costs=ALWAYS_COPY)


def taken(num_steps: int = 6) -> tuple[RequestSnapshot, list[int]]:
    """What a request has in memory after some steps, and its answer so far."""
    rig = rig_of()
    rig.submit(submit("a", PROMPT, NUM_ANSWER))
    for _ in range(num_steps):
        rig.step()
    snapshot = rig.engine.begin_move(key("a"))
    assert snapshot is not None
    return snapshot, rig.tokens[key("a")]


def go_on(rig: EngineRig, message: Submit, snapshot: RequestSnapshot) -> list[int]:
    rig.engine.submit(message, rig.now, snapshot=snapshot)
    rig.run_to_end()
    rig.assert_memory_is_free()
    return rig.tokens[key(message.request_id)]


def again(generated: list[int], prompt: list[int] = PROMPT, num_answer: int = NUM_ANSWER) -> Submit:
    return submit("a", prompt, num_answer, generated=generated)


def test_a_request_goes_on_from_a_copy_of_another_engine() -> None:
    snapshot, generated = taken()
    rig = rig_of()
    tokens = go_on(rig, again(generated), snapshot)
    assert generated + tokens == expected_tokens(PROMPT, NUM_ANSWER, VOCAB)
    stats = rig.engine.stats()
    assert (stats.restores_total, stats.refused_snapshots_total) == (1, 0)
    assert (stats.prompt_tokens_total, stats.replayed_tokens_total) == (0, 0)


def _of_another_model(snapshot: RequestSnapshot) -> RequestSnapshot:
    return replace(snapshot, model="other")


def _of_other_tokens(snapshot: RequestSnapshot) -> RequestSnapshot:
    tokens = snapshot.token_ids_T.copy()
    tokens[7] += 1
    return replace(snapshot, token_ids_T=tokens)


def _of_another_prompt_length(snapshot: RequestSnapshot) -> RequestSnapshot:
    return replace(snapshot, num_prompt=snapshot.num_prompt + 1)


def _of_other_state(snapshot: RequestSnapshot) -> RequestSnapshot:
    slot = snapshot.slot
    return replace(snapshot, slot=SlotCopy(slot.state_AHDD[..., :1], slot.conv_AJC))


def _of_other_conv(snapshot: RequestSnapshot) -> RequestSnapshot:
    slot = snapshot.slot
    return replace(snapshot, slot=SlotCopy(slot.state_AHDD, slot.conv_AJC[..., :1]))


def _of_fewer_rows(snapshot: RequestSnapshot) -> RequestSnapshot:
    return replace(snapshot, tokens_MTC=snapshot.tokens_MTC[:, :-1])


def _of_wider_rows(snapshot: RequestSnapshot) -> RequestSnapshot:
    return replace(snapshot, tokens_MTC=snapshot.tokens_MTC.repeat(1, 1, 2))


def _of_nothing(snapshot: RequestSnapshot) -> RequestSnapshot:
    return replace(
        snapshot, token_ids_T=snapshot.token_ids_T[:0], tokens_MTC=snapshot.tokens_MTC[:, :0]
    )


def _longer_than_is_known(snapshot: RequestSnapshot) -> RequestSnapshot:
    more = np.concatenate([snapshot.token_ids_T, np.ones(9, dtype=np.int32)])
    rows = torch.cat([snapshot.tokens_MTC, torch.zeros(1, 9, 1)], dim=1)
    return replace(snapshot, token_ids_T=more, tokens_MTC=rows)


@pytest.mark.parametrize(
    "spoil",
    [
        _of_another_model,
        _of_other_tokens,
        _of_another_prompt_length,
        _of_other_state,
        _of_other_conv,
        _of_fewer_rows,
        _of_wider_rows,
        _of_nothing,
        _longer_than_is_known,
    ],
    ids=lambda spoil: spoil.__name__.strip("_"),
)
def test_a_copy_of_something_else_is_left_and_everything_computed(spoil) -> None:
    snapshot, generated = taken()
    rig = rig_of()
    tokens = go_on(rig, again(generated), spoil(snapshot))
    assert generated + tokens == expected_tokens(PROMPT, NUM_ANSWER, VOCAB)
    stats = rig.engine.stats()
    assert (stats.restores_total, stats.refused_snapshots_total) == (0, 1)


@pytest.mark.parametrize("max_bytes", [0, 16], ids=["no budget", "too small a budget"])
def test_a_copy_without_room_is_left(max_bytes: int) -> None:
    snapshot, generated = taken()
    rig = rig_of(snapshots=SnapshotLimits(max_bytes=max_bytes))
    tokens = go_on(rig, again(generated), snapshot)
    assert generated + tokens == expected_tokens(PROMPT, NUM_ANSWER, VOCAB)
    assert rig.engine.stats().refused_snapshots_total == 1


def test_a_copy_of_more_than_the_answer_that_was_received_is_left() -> None:
    snapshot, generated = taken()
    rig = rig_of()
    tokens = go_on(rig, again(generated[:1]), snapshot)
    assert generated[:1] + tokens == expected_tokens(PROMPT, NUM_ANSWER, VOCAB)
    assert rig.engine.stats().refused_snapshots_total == 1


def test_the_answer_as_part_of_the_prompt_does_not_go_on_from_a_copy() -> None:
    snapshot, generated = taken()
    prompt = PROMPT + generated
    rig = rig_of()
    assert go_on(rig, again([], prompt, 5), snapshot) == expected_tokens(prompt, 5, VOCAB)
    assert rig.engine.stats().refused_snapshots_total == 1


def test_a_copy_within_the_prompt_serves_a_longer_prompt() -> None:
    rig = rig_of(max_step_tokens=16)
    rig.submit(submit("a", PROMPT, NUM_ANSWER))
    rig.step()
    snapshot = rig.engine.begin_move(key("a"))
    assert snapshot is not None
    longer = [*PROMPT[:16], *range(30)]
    other = rig_of()
    assert go_on(other, again([], longer, 5), snapshot) == expected_tokens(longer, 5, VOCAB)
    assert other.engine.stats().restores_total == 1


def test_a_score_needs_its_rows_and_goes_on_from_no_copy() -> None:
    snapshot, _ = taken()
    rig = rig_of()
    rig.engine.submit(score("a", [*PROMPT, 1, 2, 3]), rig.now, snapshot=snapshot)
    rig.run_to_end()
    assert sum(rows.num_rows for rows in rig.logits) == 43
    assert rig.engine.stats().refused_snapshots_total == 1


@pytest.mark.parametrize(
    ("num_cached", "expected"), [(20, "copy"), (39, "prefix")], ids=["shorter", "longer"]
)
def test_the_longest_of_copy_and_prefix_is_where_it_starts(num_cached: int, expected: str) -> None:
    rig = rig_of(max_step_tokens=16)
    rig.submit(submit("other", [*PROMPT[:num_cached], 5, 6], 1))
    rig.run_to_end()
    source = rig_of(max_step_tokens=16, snapshots=KEPT)
    source.submit(submit("a", PROMPT, NUM_ANSWER))
    source.step()
    snapshot = source.engine.begin_move(key("a"))
    assert snapshot is not None
    assert snapshot.position == 16
    cached = rig.engine.stats()
    tokens = go_on(rig, again([]), snapshot)
    assert tokens == expected_tokens(PROMPT, NUM_ANSWER, VOCAB)
    stats = rig.engine.stats()
    assert cached.num_prefix_snapshots >= 1
    found = "copy" if stats.restores_total else "prefix"
    assert (found, stats.prefix_hits_total) == (expected, int(expected == "prefix"))


def test_a_copy_is_given_back_whatever_becomes_of_its_request() -> None:
    snapshot, generated = taken()
    rig = rig_of(num_state_slots=1)
    rig.submit(submit("busy", [1], 100))
    rig.step()
    for name in ("cancelled", "expired", "complete"):
        message = msgspec.structs.replace(again(generated), request_id=name, timeout_s=1e6)
        if name == "expired":
            message = msgspec.structs.replace(message, timeout_s=1.0)
        if name == "complete":
            message = msgspec.structs.replace(message, max_tokens=len(generated))
        rig.engine.submit(message, rig.now, snapshot=snapshot)
    rig.engine.cancel(key("cancelled"), rig.now)
    rig.step()
    rig.step()
    reasons = {end.request_id: end.reason for end in rig.ended}
    assert reasons == {
        "cancelled": EndReason.CANCELLED,
        "expired": EndReason.DEADLINE,
        "complete": EndReason.FINISHED,
    }
    assert rig.engine.stats().request_copy_bytes == 0
    rig.run_to_end()


def test_a_request_without_memory_cannot_be_copied() -> None:
    rig = rig_of()
    rig.submit(submit("a", credit=0))
    request = rig.engine._table.find(key("a"))
    assert request is not None
    with pytest.raises(InvariantError, match="nothing in memory"):
        rig.engine.requests.capture(request)


def test_memory_that_is_not_as_large_as_the_limits_is_refused() -> None:
    memory = fake_memory(num_blocks=3, block_size=16, num_slots=4)
    with pytest.raises(InvariantError, match="memory has 3 blocks"):
        RequestMemory(memory, limits(), model="m", clock=lambda: 0.0)
