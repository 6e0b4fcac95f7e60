"""Every form of an operation against its slow twin: KDA in tiles and in steps, MLA absorbed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.numerics import Numerics
from model.batch import Segment, StepBatch
from model.kda import DeltaInputs, chunk_kda, recur_kda, step_kda
from model.mla import DECODE_TILE_TOKENS, attend_absorbed, attend_expanded, attend_plainly
from model.step_plan import plan_step
from tests.fakes.small_model import RandomTensors, small_dims

MODES = pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)


def draw_inputs(num_tokens: int, *, heads: int, width: int, seed: int) -> DeltaInputs:
    g = torch.Generator().manual_seed(seed)

    def unit(scale: float) -> torch.Tensor:
        x = torch.randn(num_tokens, heads, width, generator=g)
        return x / x.norm(dim=-1, keepdim=True) * scale

    # Decays from almost none to the strongest, as different heads have them.
    strength = torch.rand(heads, width, generator=g) ** 3
    return DeltaInputs(
        q=unit(width**-0.5),
        k=unit(1.0),
        v=torch.randn(num_tokens, heads, width, generator=g),
        log_decay=-5 * torch.rand(num_tokens, heads, width, generator=g) * strength,
        beta=torch.rand(num_tokens, heads, generator=g),
    )


@MODES
@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, 90), max_size=4), seed=st.integers(0, 10**6))
def test_tiles_equal_the_recurrence_for_every_split(
    numerics: Numerics, cuts: list[int], seed: int
) -> None:
    inputs = draw_inputs(91, heads=2, width=16, seed=seed)
    first_state = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(seed))
    expected, expected_state = recur_kda(inputs, first_state)
    state, outputs, start = first_state, [], 0
    for stop in [*sorted(set(cuts)), 91]:
        output, state = chunk_kda(inputs.rows(start, stop), state, numerics=numerics)
        outputs.append(output)
        start = stop
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "copy"])
def test_steps_equal_the_recurrence(is_in_place: bool) -> None:
    sequences = [draw_inputs(9, heads=3, width=8, seed=seed) for seed in range(4)]
    states = torch.randn(4, 3, 8, 8)
    expected = [recur_kda(inputs, states[b]) for b, inputs in enumerate(sequences)]
    state = states.clone()
    for t in range(9):
        rows = [inputs.rows(t, t + 1) for inputs in sequences]
        step = DeltaInputs(
            *(
                torch.cat([getattr(row, name) for row in rows])
                for name in ("q", "k", "v", "log_decay", "beta")
            )
        )
        output, state = step_kda(step, step.log_decay.exp(), state, is_in_place=is_in_place)
        for b in range(4):
            torch.testing.assert_close(output[b], expected[b][0][t], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, torch.stack([new for _, new in expected]))


def test_step_leaves_the_old_state_alone_unless_told() -> None:
    inputs = draw_inputs(2, heads=1, width=8, seed=0)
    state = torch.randn(2, 1, 8, 8)
    before = state.clone()
    step_kda(inputs, inputs.log_decay.exp(), state)
    assert torch.equal(state, before)


@MODES
def test_absorbed_form_equals_the_plain_one(numerics: Numerics) -> None:
    dims = small_dims()
    weights = RandomTensors(0, torch.float32).mla(dims)
    pool = torch.randn(40, 8, dims.mla.cache_width)
    tables = [tuple(range(i, 40, 4)) for i in range(4)]
    lengths = [1, 8, 37, 80]
    segments = tuple(
        Segment(i, 1, length - 1, True, i, table)
        for i, (length, table) in enumerate(zip(lengths, tables, strict=True))
    )
    batch = StepBatch(torch.zeros(4, dtype=torch.int64), segments, torch.arange(4))
    plan = plan_step(batch, block_size=8, numerics=numerics)
    q = torch.randn(4, 2, 24) * 3
    rows = torch.cat([group.rows_B for group in plan.decode_groups])
    output = attend_absorbed(q[rows], pool, plan.decode_groups, weights, numerics=numerics)
    for b, row in enumerate(rows.tolist()):
        cache = pool[list(tables[row])].flatten(0, 1)[: lengths[row]]
        expected = attend_plainly(
            q[row : row + 1], cache, weights.k_up_proj, weights.v_up_proj, position=lengths[row] - 1
        )
        torch.testing.assert_close(output[b], expected[0], rtol=1e-4, atol=1e-5)


@MODES
@pytest.mark.parametrize("block_size", [8, 48, 2 * DECODE_TILE_TOKENS])
def test_absorbed_form_in_tiles_equals_the_plain_one(numerics: Numerics, block_size: int) -> None:
    tile = DECODE_TILE_TOKENS
    # Below 2 tiles and above it they attend in two groups, the shorter ones masked.
    lengths = [tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1, 3 * tile + 7]
    weights = RandomTensors(0, torch.float32).mla(small_dims())
    blocks_each = -(-lengths[-1] // block_size)
    num_blocks = len(lengths) * blocks_each
    pool = torch.randn(num_blocks, block_size, small_dims().mla.cache_width)
    tables = [tuple(range(i, num_blocks, len(lengths))) for i in range(len(lengths))]
    segments = tuple(
        Segment(i, 1, length - 1, True, i, table)
        for i, (length, table) in enumerate(zip(lengths, tables, strict=True))
    )
    batch = StepBatch(torch.zeros(5, dtype=torch.int64), segments, torch.arange(5))
    plan = plan_step(batch, block_size=block_size, numerics=numerics)
    q = torch.randn(5, 2, 24) * 3
    rows = torch.cat([group.rows_B for group in plan.decode_groups])
    output = attend_absorbed(q[rows], pool, plan.decode_groups, weights, numerics=numerics)
    for b, row in enumerate(rows.tolist()):
        cache = pool[list(tables[row])].flatten(0, 1)[: lengths[row]]
        expected = attend_plainly(
            q[row : row + 1], cache, weights.k_up_proj, weights.v_up_proj, position=lengths[row] - 1
        )
        torch.testing.assert_close(output[b], expected[0], rtol=1e-4, atol=1e-5)


def test_absorbed_form_equals_the_expanded_one() -> None:
    dims = small_dims()
    weights = RandomTensors(0, torch.float32).mla(dims)
    pool, q = torch.randn(5, 8, dims.mla.cache_width), torch.randn(1, 2, 24)
    segment = Segment(0, 1, 36, True, 0, (4, 2, 0, 1, 3))
    batch = StepBatch(torch.tensor([0]), (segment,), torch.tensor([0]))
    plan = plan_step(batch, block_size=8, numerics=Numerics.FAST)
    cache = pool[[4, 2, 0, 1, 3]].flatten(0, 1)
    expanded = attend_expanded(
        q,
        lambda first, num: cache[first : first + num],
        weights,
        position=36,
        numerics=Numerics.FAST,
    )
    absorbed = attend_absorbed(q, pool, plan.decode_groups, weights, numerics=Numerics.FAST)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-4, atol=1e-5)
