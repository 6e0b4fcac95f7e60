"""What every dispatch plan keeps, whatever is picked and wherever the experts live."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.ids import Epoch, WorkerId
from configs.numerics import FloatType
from router.combine import LatentSum, PartialSum
from router.dispatch_plan import DispatchPlan
from router.pairs import EXPERT, ROW, WEIGHT, list_pairs, rank_pairs
from router.placement import LayerPlacement
from router.plan import plan_dispatch
from router.routes import LayerRoutes, index_placement

Case = tuple[np.ndarray, np.ndarray, LayerRoutes]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_experts = draw(st.integers(1, 12))
    num_workers = draw(st.integers(1, 5))
    workers = [WorkerId(f"expert-{i}") for i in range(num_workers)]
    holders = draw(
        st.lists(
            st.lists(st.sampled_from(workers), min_size=1, unique=True).map(tuple),
            min_size=num_experts,
            max_size=num_experts,
        )
    )
    num_picks = draw(st.integers(1, min(4, num_experts)))
    num_tokens = draw(st.integers(0, 9))
    ids = [draw(st.permutations(range(num_experts)))[:num_picks] for _ in range(num_tokens)]
    seed = draw(st.integers(0, 1000))
    weights = np.random.default_rng(seed).random((num_tokens, num_picks), np.float32)
    placement = LayerPlacement(layer=1, epoch=Epoch(1), holders=tuple(holders))
    return (
        np.array(ids, np.int64).reshape(num_tokens, num_picks),
        weights,
        index_placement(placement),
    )


def plan_case(case: Case) -> DispatchPlan:
    ids, weights, routes = case
    return plan_dispatch(list_pairs(ids, weights, layer=1), len(ids), routes)


def tokens_of(plan: DispatchPlan, part_index: int) -> np.ndarray:
    rows = plan.parts[part_index].rows_N
    return np.arange(plan.num_tokens) if rows is None else rows


@given(cases())
def test_every_pair_is_dispatched_once_with_its_weight(case: Case) -> None:
    ids, weights, _ = case
    plan = plan_case(case)
    sent = []
    for i, part in enumerate(plan.parts):
        tokens = tokens_of(plan, i)[part.pairs_3Q[ROW]]
        sent += zip(
            tokens.tolist(),
            part.pairs_3Q[EXPERT].tolist(),
            part.pairs_3Q[WEIGHT].tolist(),
            strict=True,
        )
    bits = weights.view(np.uint32)
    expected = [
        (t, int(ids[t, k]), int(bits[t, k]))
        for t, k in itertools.product(*(range(n) for n in ids.shape))
    ]
    assert sorted(sent) == sorted(expected)


@given(cases())
def test_every_pair_goes_to_a_worker_that_holds_its_expert(case: Case) -> None:
    routes = case[2]
    for part in plan_case(case).parts:
        for expert in part.pairs_3Q[EXPERT].tolist():
            assert part.worker in routes.copies.worker_ER[expert]


@given(cases())
def test_a_latent_goes_once_to_each_worker_and_only_where_it_is_needed(case: Case) -> None:
    plan = plan_case(case)
    for i, part in enumerate(plan.parts):
        tokens = tokens_of(plan, i)
        assert len(tokens) == part.num_rows
        assert np.all(np.diff(tokens) > 0)
        assert set(part.pairs_3Q[ROW].tolist()) == set(range(part.num_rows))


@given(cases())
def test_every_answer_has_a_place_of_its_own(case: Case) -> None:
    plan = plan_case(case)
    positions = [
        np.arange(part.num_pairs) if part.positions_Q is None else part.positions_Q
        for part in plan.parts
    ]
    used = sorted(itertools.chain.from_iterable(p.tolist() for p in positions))
    assert used == list(range(plan.num_pairs))


@given(cases())
def test_in_canonical_order_the_experts_of_a_token_ascend(case: Case) -> None:
    ids, weights, routes = case
    pairs = list_pairs(ids, weights, layer=1)
    order = rank_pairs(pairs, len(ids), routes)
    ranked = pairs.take(order.positions_P, axis=1)
    assert np.array_equal(np.sort(order.positions_P), np.arange(ids.size))
    assert order.weights_P.tobytes() == ranked[WEIGHT].tobytes()
    assert np.array_equal(ranked[EXPERT].reshape(ids.shape[::-1]).T, np.sort(ids, axis=1))
    assert np.array_equal(ranked[ROW], np.tile(np.arange(len(ids)), ids.shape[1]))


@given(cases())
def test_identity_experts_with_weights_of_sum_one_give_the_latents_back(case: Case) -> None:
    ids, _, routes = case
    num_tokens, num_picks = ids.shape
    # Powers of two, so that the sum is exact: 1/2, 1/4, ..., and the last one twice.
    weights = np.repeat(
        [0.5 ** np.minimum(np.arange(1, num_picks + 1), num_picks - 1)], num_tokens, 0
    )
    weights = weights.astype(np.float32)
    z = torch.arange(num_tokens * 3, dtype=torch.float32).reshape(num_tokens, 3)
    pairs = list_pairs(ids, weights, layer=1)
    order = rank_pairs(pairs, num_tokens, routes)
    plan = plan_dispatch(pairs, num_tokens, routes)
    answers = np.empty((weights.size, 12), np.uint8)
    partial = []
    for i, part in enumerate(plan.parts):
        rows = z.numpy()[tokens_of(plan, i)]
        pair_rows = rows[part.pairs_3Q[ROW]]
        positions = slice(None) if part.positions_Q is None else part.positions_Q
        answers[positions] = pair_rows.view(np.uint8).reshape(-1, 12)
        sums = np.zeros_like(rows)
        np.add.at(
            sums, part.pairs_3Q[ROW], pair_rows * part.pairs_3Q[WEIGHT].view(np.float32)[:, None]
        )
        partial.append(PartialSum(part, sums.view(np.uint8).reshape(-1)))
    adder = LatentSum(latent_size=3, wire_dtype=FloatType.FLOAT32)
    assert torch.equal(adder.add_pairs(answers.reshape(-1), order=order, num_tokens=num_tokens), z)
    assert torch.equal(adder.add_partial_sums(partial, num_tokens=num_tokens), z)
