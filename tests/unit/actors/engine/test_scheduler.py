"""What a step computes, from a frozen state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.preemption import PAUSE_PATIENCE_STEPS
from actors.engine.scheduler import (
    MAX_REPLAY_TOKENS,
    PREFILL_PATIENCE_STEPS,
    Chunk,
    DecodeLane,
    LogitsWanted,
    StepPlan,
    schedule,
)
from actors.engine.scheduler_state import TILE_TOKENS, SchedulerState, SnapshotRule
from tests.fakes.engine_rig import key
from tests.fakes.scheduler_views import View, state


def view(name: str, **changes: int | bool) -> View:
    return View(key(name), **changes)


def decoding(name: str, **changes: int | bool) -> View:
    return View(key(name), **{"prompt": 8, "known": 9, "computed": 8} | changes)


def names(chunks: tuple[Chunk, ...]) -> list[str]:
    return [chunk.key.request_id for chunk in chunks]


def test_nothing_to_do_gives_an_empty_plan() -> None:
    plan = schedule(state())
    assert plan == StepPlan((), (), DecodeLane(), (), is_prefill_starved=False)


def test_decode_and_prefill_are_two_lanes_of_one_step() -> None:
    plan = schedule(state(decoding("d"), view("p", prompt=20)))
    assert [*plan.decode] == [Chunk(key("d"), 8, 1, is_decode=True, logits=LogitsWanted.LAST)]
    assert plan.prefill == (Chunk(key("p"), 0, 20, is_decode=False, logits=LogitsWanted.LAST),)


def test_decode_goes_first_and_prefill_takes_the_rest() -> None:
    running = [decoding(f"d{i}") for i in range(20)]
    plan = schedule(state(*running, view("p", prompt=200), max_step_tokens=64))
    assert len(plan.decode) == 20
    assert [chunk.num_tokens for chunk in plan.prefill] == [32]


def test_a_chunk_ends_on_the_tile_grid_of_absolute_positions() -> None:
    plan = schedule(state(view("p", prompt=100, computed=16), max_step_tokens=45))
    [chunk] = plan.prefill
    assert (chunk.position, chunk.num_tokens, chunk.logits) == (16, 32, LogitsWanted.NONE)


def test_the_last_chunk_ends_at_the_prompt_and_wants_logits() -> None:
    plan = schedule(state(view("p", prompt=37, computed=32)))
    [chunk] = plan.prefill
    assert (chunk.num_tokens, chunk.logits) == (5, LogitsWanted.LAST)


def test_a_step_prefills_several_requests() -> None:
    plan = schedule(state(view("a", prompt=10), view("b", prompt=30), view("c", prompt=90)))
    assert [(c.key.request_id, c.num_tokens) for c in plan.prefill] == [
        ("a", 10),
        ("b", 30),
        ("c", 16),
    ]


def test_short_prompts_go_on_beside_a_long_one_that_came_first() -> None:
    plan = schedule(state(view("long", prompt=900), view("b", prompt=90), view("c", prompt=20)))
    assert [(c.key.request_id, c.num_tokens) for c in plan.prefill] == [("long", 32), ("c", 20)]


def test_a_long_prompt_that_came_first_is_not_held_up_by_short_ones() -> None:
    shorts = [view(f"s{i}", prompt=10) for i in range(20)]
    plan = schedule(state(view("long", prompt=900), *shorts))
    assert plan.prefill[0] == Chunk(key("long"), 0, 32, False, LogitsWanted.NONE)


def test_less_room_than_a_tile_gives_no_chunk_and_says_so() -> None:
    running = [decoding(f"d{i}") for i in range(10)]
    plan = schedule(state(*running, view("p", prompt=50), max_step_tokens=16))
    assert plan.prefill == ()
    assert plan.is_prefill_starved


def test_a_prompt_that_fits_the_rest_needs_no_whole_tile() -> None:
    running = [decoding(f"d{i}") for i in range(10)]
    plan = schedule(state(*running, view("p", prompt=6), max_step_tokens=16))
    assert [chunk.num_tokens for chunk in plan.prefill] == [6]


def test_starved_prefill_gets_a_tile_in_the_end() -> None:
    running = [decoding(f"d{i}") for i in range(20)]
    plan = schedule(
        state(
            *running,
            view("p", prompt=50),
            max_step_tokens=20,
            starved_steps=PREFILL_PATIENCE_STEPS,
        )
    )
    assert len(plan.decode) == 4
    assert [chunk.num_tokens for chunk in plan.prefill] == [TILE_TOKENS]


def test_more_decodes_than_room_take_turns() -> None:
    running = [decoding(f"d{i}", last_step=9 - i) for i in range(4)]
    plan = schedule(state(*running, max_step_tokens=2))
    assert names(plan.decode) == ["d2", "d3"]


def test_a_paused_request_computes_nothing() -> None:
    plan = schedule(state(decoding("d", paused=True), view("p", paused=True)))
    assert ([*plan.decode], plan.prefill, plan.is_prefill_starved) == ([], (), False)


def test_admission_is_first_come_first_served_by_memory() -> None:
    queued = (view("a", blocks=3), view("b", blocks=5), view("c", blocks=1))
    plan = schedule(state(queued=queued, num_available_blocks=8))
    assert plan.admitted == (key("a"),)  # c must not overtake b


def test_admission_stops_at_the_free_slots() -> None:
    queued = (view("a"), view("b"), view("c"))
    plan = schedule(state(queued=queued, num_free_slots=2))
    assert plan.admitted == (key("a"), key("b"))


def test_a_group_is_admitted_as_a_whole_and_not_overtaken() -> None:
    group = view("group", slots=3)
    queue = (view("first"), group, view("last"))
    assert [key.request_id for key in schedule(state(queued=queue, num_free_slots=3)).admitted] == [
        "first"
    ]
    assert [key.request_id for key in schedule(state(queued=queue, num_free_slots=4)).admitted] == [
        "first",
        "group",
    ]


def test_an_admitted_request_prefills_in_the_same_step() -> None:
    plan = schedule(state(queued=(view("a"),)))
    assert names(plan.prefill) == ["a"]


def test_a_score_wants_all_rows_within_the_row_limit() -> None:
    plan = schedule(state(view("s", prompt=100, score=True), max_logit_rows=32))
    [chunk] = plan.prefill
    assert (chunk.num_tokens, chunk.logits, chunk.num_logit_rows) == (32, LogitsWanted.ALL, 32)


def test_a_score_without_rows_does_not_hold_up_a_prompt() -> None:
    running = (view("s", prompt=32, score=True), view("t", prompt=40, score=True), view("p"))
    plan = schedule(state(*running, max_logit_rows=32, max_step_tokens=128))
    assert sorted(names(plan.prefill)) == ["p", "t"]


@pytest.mark.parametrize(
    ("credit", "computed", "expected"),
    [(16, 0, [16]), (31, 0, [16]), (47, 16, [32]), (4, 96, [4]), (3, 96, []), (15, 0, [])],
    ids=["one tile", "not two", "from the grid on", "rest", "less than the rest", "no tile"],
)
def test_a_score_computes_what_its_credit_reaches(
    credit: int, computed: int, expected: list[int]
) -> None:
    plan = schedule(state(view("s", prompt=100, computed=computed, score=True, credit=credit)))
    assert [chunk.num_tokens for chunk in plan.prefill] == expected


@pytest.mark.parametrize("credit", [0, 15, 16], ids=["none", "no tile", "one tile"])
def test_a_score_short_of_credit_does_not_hold_up_a_prompt(credit: int) -> None:
    score = view("s", prompt=100, score=True, paused=credit == 0, credit=credit)
    plan = schedule(state(score, view("p", prompt=20), decoding("d")))
    assert names(plan.decode) == ["d"]
    assert names(plan.prefill)[-1] == "p"
    assert not plan.is_prefill_starved


def test_generated_tokens_of_an_earlier_attempt_are_replayed_in_decode_form() -> None:
    plan = schedule(state(view("r", prompt=8, known=18, computed=8)))
    [chunk] = plan.prefill
    assert chunk == Chunk(key("r"), 8, 9, is_decode=True, logits=LogitsWanted.NONE)


def test_the_prompt_of_a_replayed_attempt_samples_nothing() -> None:
    plan = schedule(state(view("r", prompt=8, known=18)))
    assert [chunk.logits for chunk in plan.prefill] == [LogitsWanted.NONE]


def test_a_request_that_has_caught_up_decodes() -> None:
    plan = schedule(state(view("r", prompt=8, known=18, computed=17)))
    assert [chunk.position for chunk in plan.decode] == [17]
    assert plan.prefill == ()


def test_a_replay_holds_up_the_lane_for_few_tokens() -> None:
    plan = schedule(state(view("r", prompt=8, known=200, computed=8)))
    assert [chunk.num_tokens for chunk in plan.prefill] == [MAX_REPLAY_TOKENS]


RULE = SnapshotRule(interval_tokens=32, min_gain_tokens=16, num_scratch=1)


@pytest.mark.parametrize(
    ("prompt", "computed", "saved", "expected"),
    [
        (40, 0, 0, (32, 40)),
        (33, 0, 0, (32, 33)),
        (32, 0, 0, (16, 32)),
        (16, 0, 0, (None, 16)),
        (200, 0, 0, (64, 64)),
        (200, 48, 32, (96, 112)),
        (40, 16, 32, (None, 40)),
    ],
    ids=[
        "last grid position",
        "one token after it",
        "the same prompt can use it",
        "too short",
        "multiple of the interval",
        "last multiple in the chunk",
        "no gain over the last one",
    ],
)
def test_a_chunk_leaves_a_snapshot(prompt: int, computed: int, saved: int, expected) -> None:
    request = view("p", prompt=prompt, computed=computed, saved=saved)
    [chunk] = schedule(state(request, snapshots=RULE)).prefill
    assert (chunk.save_at, chunk.end) == expected


def test_snapshots_within_chunks_are_as_many_as_there_is_scratch() -> None:
    plan = schedule(state(*(view(f"p{i}", prompt=20) for i in range(3)), snapshots=RULE))
    assert sum(chunk.save_at is not None for chunk in plan.prefill) == 1


def test_without_a_rule_nothing_is_saved() -> None:
    [chunk] = schedule(state(view("p", prompt=40))).prefill
    assert chunk.save_at is None


def full(name: str, **changes: int | bool) -> View:
    """One whose last block is full."""
    return decoding(name, **{"prompt": 8, "known": 17, "computed": 16, "blocks": 1} | changes)


def preempted(plan: StepPlan) -> list[str]:
    return [key.request_id for key in plan.preempted]


def test_the_last_in_rank_gives_way_when_no_block_is_left() -> None:
    running = [full("a"), full("b", private=1), decoding("c", private=1)]
    plan = schedule(state(*running, num_available_blocks=1))
    assert (preempted(plan), names(plan.decode)) == (["c"], ["a", "b"])


def test_one_that_grows_itself_needs_none_once_it_gives_way() -> None:
    plan = schedule(state(full("a"), full("b", private=3), num_available_blocks=1))
    assert (preempted(plan), names(plan.decode)) == (["b"], ["a"])


def test_the_first_in_rank_never_gives_way() -> None:
    plan = schedule(state(full("a"), full("b", private=0), num_available_blocks=0))
    assert (preempted(plan), names(plan.decode)) == (["b"], [])


def test_one_that_cannot_run_gives_way_before_others() -> None:
    running = [full("a"), decoding("b", paused=True, private=1), decoding("c", private=1)]
    plan = schedule(state(*running, num_available_blocks=0))
    assert (preempted(plan), names(plan.decode)) == (["b"], ["a", "c"])


def test_a_follower_never_gives_way_alone() -> None:
    running = [full("a"), decoding("b", private=1, slots=2), decoding("f", slots=0, paused=True)]
    plan = schedule(state(*running, num_available_blocks=0))
    assert preempted(plan) == ["b"]


def test_nothing_is_admitted_while_others_give_way() -> None:
    running = [full("a"), full("b", private=5)]
    plan = schedule(state(*running, queued=(view("q"),), num_available_blocks=0))
    assert plan.admitted == ()


def test_admission_leaves_a_block_for_each_running_request() -> None:
    running = [decoding("a"), decoding("b")]
    queued = (view("q", blocks=3),)
    assert schedule(state(*running, queued=queued, num_available_blocks=4)).admitted == ()
    assert schedule(state(*running, queued=queued, num_available_blocks=5)).admitted != ()


def test_a_more_urgent_request_takes_the_slot_of_a_less_urgent_one() -> None:
    running = [decoding("a", priority=5), decoding("b"), decoding("c", priority=5)]
    plan = schedule(state(*running, queued=(view("q"),), num_free_slots=0))
    assert (preempted(plan), names(plan.decode)) == (["c"], ["a", "b"])


def test_nobody_gives_way_where_that_is_not_enough() -> None:
    running = [decoding("a"), decoding("b", priority=5, private=1)]
    queued = (view("q", blocks=50),)
    plan = schedule(state(*running, queued=queued, num_available_blocks=3))
    assert (preempted(plan), plan.admitted) == ([], ())


@pytest.mark.parametrize(("waited", "expected"), [(-1, []), (0, ["a"])], ids=["not yet", "long"])
def test_one_that_could_not_run_for_long_makes_room(waited: int, expected: list[str]) -> None:
    running = [decoding("a", paused=True, last_step=10), decoding("b")]
    step = 10 + PAUSE_PATIENCE_STEPS + waited
    plan = schedule(state(*running, queued=(view("q"),), num_free_slots=0, step=step))
    assert preempted(plan) == expected


views = st.builds(
    lambda prompt, extra, done, blocks, paused, score, credit, last: view(
        "r",
        prompt=prompt,
        known=prompt if score else prompt + extra,
        computed=min(done * TILE_TOKENS, prompt if score else prompt + max(extra - 1, 0))
        if done * TILE_TOKENS < prompt
        else prompt,
        blocks=blocks,
        paused=paused,
        score=score,
        credit=credit,
        last_step=last,
    ),
    st.integers(1, 90),
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 100),
    st.integers(0, 5),
)
states = st.builds(
    lambda running, queued, blocks, slots, budget, rows, starved: state(
        *(replace(v, key=key(f"r{i}")) for i, v in enumerate(running)),
        queued=tuple(replace(v, key=key(f"q{i}"), computed=0) for i, v in enumerate(queued)),
        num_available_blocks=blocks,
        num_free_slots=slots,
        max_step_tokens=budget,
        max_logit_rows=rows * TILE_TOKENS,
        starved_steps=starved,
    ),
    st.lists(views, max_size=8),
    st.lists(views, max_size=4),
    st.integers(0, 8),
    st.integers(0, 4),
    st.integers(TILE_TOKENS, 80),
    st.integers(1, 4),
    st.integers(0, 10),
)


@given(states)
def test_a_plan_keeps_every_limit(given_state: SchedulerState) -> None:
    plan = schedule(given_state)
    chunks = [*plan.decode, *plan.prefill]
    running = [given_state.running.request(i) for i in range(len(given_state.running))]
    queued = [view.request for view in given_state.queued]
    views_by_key = {v.key: v for v in (*running, *queued)}
    admitted = [v for v in given_state.queued if v.request.key in plan.admitted]
    assert sum(chunk.num_tokens for chunk in chunks) <= given_state.max_step_tokens
    assert sum(v.num_blocks for v in admitted) <= given_state.num_available_blocks
    assert len(plan.admitted) <= given_state.num_free_slots
    scored = [c.num_tokens for c in chunks if c.logits is LogitsWanted.ALL]
    assert sum(scored) <= given_state.max_logit_rows
    assert len({chunk.key for chunk in chunks}) == len(chunks)
    for chunk in chunks:
        request = views_by_key[chunk.key]
        assert chunk.key not in plan.preempted
        assert chunk.num_tokens > 0
        assert chunk.is_decode or chunk.end <= request.row_limit
        assert chunk.is_decode or chunk.end % TILE_TOKENS == 0 or chunk.end == request.num_prompt


@given(states)
def test_a_step_always_makes_progress_when_a_request_can(given_state: SchedulerState) -> None:
    plan = schedule(given_state)
    alone = [can_go_on_alone(given_state, i) for i in range(len(given_state.running))]
    assert not any(alone) or plan.decode or plan.prefill or plan.preempted


def can_go_on_alone(given_state: SchedulerState, index: int) -> bool:
    """Whether a request would be computed if no other ran or waited."""
    running = given_state.running
    arrays = {
        name: getattr(running, name)[index : index + 1]
        for name in running.__dataclass_fields__
        if name != "keys"
    }
    one = replace(running, keys=running.keys[index : index + 1], **arrays)
    plan = schedule(replace(given_state, running=one, queued=(), starved_steps=0))
    return bool(plan.decode or plan.prefill)


@pytest.mark.parametrize("budget", [16, 17, 31, 32, 100])
def test_planning_is_pure(budget: int) -> None:
    given_state = state(decoding("d"), view("p", prompt=50), max_step_tokens=budget)
    assert schedule(given_state) == schedule(given_state)


def test_where_nobody_can_run_room_is_made_at_once() -> None:
    running = [decoding("a", paused=True), decoding("b", paused=True)]
    plan = schedule(state(*running, queued=(view("q"),), num_free_slots=0))
    assert preempted(plan) == ["b"]


def test_a_less_urgent_one_that_ranks_before_the_head_does_not_give_way() -> None:
    running = [decoding("a", priority=5), decoding("b", priority=5)]
    queued = replace_ahead(state(*running, queued=(view("q"),), num_free_slots=0), num_ahead=1)
    assert preempted(schedule(queued)) == ["b"]
    assert preempted(schedule(replace_ahead(queued, num_ahead=2))) == []


def replace_ahead(given: SchedulerState, *, num_ahead: int) -> SchedulerState:
    return replace(given, queued=tuple(one._replace(num_ahead=num_ahead) for one in given.queued))
