"""The engine at the edges of its memory: what fits ends, what does not is refused, nobody waits for
ever.
"""

from __future__ import annotations

import msgspec
import pytest

from actors.engine.admission import SnapshotLimits
from configs.numerics import EndReason
from tests.fakes.engine_rig import (
    ALWAYS_COPY,
    NEVER_COPY,
    VOCAB,
    EngineRig,
    key,
    limits,
    score,
    submit,
)
from tests.fakes.fake_decoder import expected_tokens

KEPT = SnapshotLimits(max_bytes=10_000, interval_tokens=16, min_gain_tokens=1)
NONE_KEPT = SnapshotLimits(max_bytes=0)
COSTS = pytest.mark.parametrize("costs", [ALWAYS_COPY, NEVER_COPY], ids=["copies", "recomputes"])


def ids(prompt_length: int, offset: int = 0) -> list[int]:
    return [(offset + position * 7) % VOCAB for position in range(prompt_length)]


@pytest.mark.parametrize("rule", [KEPT, NONE_KEPT], ids=["snapshots", "no snapshots"])
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_length_at_capacity_ends_or_is_refused_at_once(num_blocks, excess, rule) -> None:
    rig = EngineRig(limits(num_blocks=num_blocks, snapshots=rule))
    length = num_blocks * 16 + excess
    rig.submit(submit("a", ids(10), length - 10))
    rig.submit(score("s", ids(length)))
    if excess > 0:
        assert rig.engine.num_live == 0
        rig.step()
        assert {rig.end_of(name).error_code for name in "as"} == {"REQUEST_TOO_LARGE"}
    else:
        rig.run_to_end()
        assert rig.tokens[key("a")] == expected_tokens(ids(10), length - 10, VOCAB)
        assert sum(rows.num_rows for rows in rig.logits) == length
    rig.assert_memory_is_free()


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_a_length_at_the_context_ends_or_is_refused_at_once(excess) -> None:
    rig = EngineRig(limits(context_tokens=40))
    rig.submit(submit("a", ids(30), 10 + excess))
    rig.run_to_end()
    refused = rig.end_of("a").reason is EndReason.REJECTED
    assert refused == (excess > 0)


def test_many_share_a_pool_of_one_block_by_turns() -> None:
    rig = EngineRig(limits(num_blocks=1, snapshots=KEPT))
    for index in range(5):
        rig.submit(submit(f"r{index}", ids(6, index), 10))
    rig.run_to_end()
    for index in range(5):
        assert rig.tokens[key(f"r{index}")] == expected_tokens(ids(6, index), 10, VOCAB)
    rig.assert_memory_is_free()


@pytest.mark.parametrize("block_tokens", [32, 64])
def test_one_that_needs_the_whole_pool_can_begin_at_a_snapshot_within_a_block(block_tokens) -> None:
    num_blocks = 128 // block_tokens
    rig = EngineRig(limits(num_blocks=num_blocks, block_tokens=block_tokens, snapshots=KEPT))
    rig.submit(submit("first", ids(50), 2))
    rig.run_to_end()
    prompt = ids(50) + ids(50, 3)
    rig.submit(submit("second", prompt, 28))
    rig.run_to_end()
    assert rig.tokens[key("second")] == expected_tokens(prompt, 28, VOCAB)
    assert rig.engine.stats().prefix_hit_tokens_total == 48
    rig.assert_memory_is_free()


def test_a_queue_of_no_length_takes_all_that_fit_the_slots() -> None:
    rig = EngineRig(limits(num_state_slots=40, num_blocks=200, max_queued_requests=0))
    for index in range(41):
        rig.submit(submit(f"r{index}"))
    rig.run_to_end()
    refused = [end.request_id for end in rig.ended if end.reason is EndReason.REJECTED]
    assert refused == ["r40"]


@COSTS
def test_an_urgent_request_never_trades_places_for_ever_with_one_that_ranks_before_it(
    costs,
) -> None:
    rig = EngineRig(limits(num_state_slots=1, snapshots=KEPT), costs=costs)
    rig.submit(msgspec.structs.replace(submit("patient", [1], 200), priority=1))
    for _ in range(70):
        rig.step()
    rig.submit(submit("urgent", [2], 5))
    rig.run_to_end(400)
    assert rig.tokens[key("patient")] == expected_tokens([1], 200, VOCAB)


@COSTS
def test_an_urgent_request_displaces_a_less_urgent_one_that_ranks_behind_it(costs) -> None:
    rig = EngineRig(limits(num_state_slots=1, snapshots=KEPT), costs=costs)
    rig.submit(msgspec.structs.replace(submit("later", [1], 200), priority=5))
    for _ in range(20):
        rig.step()
    rig.submit(submit("urgent", [2], 5))
    rig.run_to_end(400)
    assert [end.request_id for end in rig.ended] == ["urgent", "later"]
    assert rig.tokens[key("later")] == expected_tokens([1], 200, VOCAB)


def test_a_paused_request_gives_way_at_once_where_nothing_else_runs() -> None:
    rig = EngineRig(limits(num_state_slots=1))
    rig.submit(submit("paused", [1], 20, credit=1))
    rig.step()
    rig.submit(submit("next", [2], 5))
    for _ in range(10):
        rig.step()
    assert rig.end_of("next").reason is EndReason.FINISHED
    rig.engine.credit(key("paused"), 100)
    rig.run_to_end()
    assert rig.tokens[key("paused")] == expected_tokens([1], 20, VOCAB)


@COSTS
def test_paused_answers_to_one_prompt_give_way_though_each_alone_frees_little(costs) -> None:
    rig = EngineRig(limits(num_state_slots=8, num_blocks=16, snapshots=KEPT), costs=costs)
    prompt = ids(160)
    rig.submit(submit("paused", prompt, 20, credit=1, choices=3))
    for _ in range(6):
        rig.step()
    rig.submit(submit("next", ids(190, 5), 10))
    for _ in range(100):
        rig.step()
    assert rig.end_of("next").reason is EndReason.FINISHED
    for name in ("paused", "paused.1", "paused.2"):
        rig.engine.credit(key(name), 100)
    rig.run_to_end()
    for name in ("paused", "paused.1", "paused.2"):
        assert rig.tokens[key(name)] == expected_tokens(prompt, 20, VOCAB)
    rig.assert_memory_is_free()


def test_a_score_whose_credit_ends_off_the_grid_blocks_nobody() -> None:
    rig = EngineRig(limits(num_state_slots=1))
    rig.submit(score("short", ids(100), credit=24))
    for _ in range(3):
        rig.step()
    rig.submit(submit("next", [2], 5))
    for _ in range(10):
        rig.step()
    assert rig.end_of("next").reason is EndReason.FINISHED
    rig.engine.credit(key("short"), 76)
    rig.run_to_end()
    assert next(rows.first_position for rows in rig.logits) == 0
    assert sum(rows.num_rows for rows in rig.logits) == 100


def test_a_gateway_that_does_not_read_holds_up_nobody_else() -> None:
    rig = EngineRig(limits(num_state_slots=1))
    rig.submit(submit("slow", [1], 20))
    rig.step()
    rig.submit(submit("next", [2], 5))
    for _ in range(10):
        rig.step(held={key("slow")})
    assert rig.end_of("next").reason is EndReason.FINISHED
    rig.run_to_end()
    assert rig.tokens[key("slow")] == expected_tokens([1], 20, VOCAB)


@COSTS
@pytest.mark.parametrize("ended", ["g", "g.1", "g.2"], ids=["leader", "second", "last"])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_group_goes_on_when_one_of_it_is_cancelled_in_prefill(costs, ended, is_preempted) -> None:
    rig = EngineRig(limits(max_step_tokens=16, snapshots=KEPT, num_blocks=24), costs=costs)
    prompt = ids(70)
    rig.submit(msgspec.structs.replace(submit("g", prompt, 9, choices=3), priority=5))
    rig.step()
    rig.step()
    if is_preempted:
        rig.submit(submit("urgent", [4] * 120, 100))
        rig.submit(submit("more", [5] * 120, 100))
        rig.step()
        assert not rig.engine.stats().num_running or rig.engine.stats().num_queued
    rig.engine.cancel(key(ended), rig.now)
    rig.run_to_end()
    for name in {"g", "g.1", "g.2"} - {ended}:
        assert rig.tokens[key(name)] == expected_tokens(prompt, 9, VOCAB)
    assert rig.end_of(ended).reason is EndReason.CANCELLED
    rig.assert_memory_is_free()


@COSTS
def test_three_answers_that_outgrow_memory_are_all_right(costs) -> None:
    rig = EngineRig(limits(num_blocks=7, snapshots=KEPT), costs=costs)
    prompt = ids(35)
    rig.submit(submit("g", prompt, 70, choices=3))
    rig.run_to_end()
    for name in ("g", "g.1", "g.2"):
        assert rig.tokens[key(name)] == expected_tokens(prompt, 70, VOCAB)
    stats = rig.engine.stats()
    assert stats.kept_preemptions_total + stats.dropped_preemptions_total > 0
    rig.assert_memory_is_free()


@COSTS
def test_rows_of_preempted_prompts_are_reported_once(costs) -> None:
    rig = EngineRig(limits(num_state_slots=1, max_step_tokens=16, snapshots=KEPT), costs=costs)
    prompt = ids(90)
    rig.submit(msgspec.structs.replace(score("s", prompt), priority=50))
    asked = msgspec.structs.replace(submit("p", prompt, 3), prompt_logprobs=2, priority=50)
    rig.submit(asked)
    positions = []
    for step in range(60):
        if step in (2, 13):
            rig.submit(submit(f"urgent{step}", [3], 2))
        for news in rig.step().prompt_logprobs:
            first = news.first_position
            positions += range(first, first + len(news.logprobs))
    assert rig.engine.num_live == 0
    assert positions == list(range(1, 90))
    rows = [(one.first_position, one.num_rows) for one in rig.logits]
    assert [p for first, num in rows for p in range(first, first + num)] == list(range(90))
    stats = rig.engine.stats()
    assert stats.kept_preemptions_total + stats.dropped_preemptions_total == 2
