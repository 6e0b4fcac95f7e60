"""plan_step."""

from __future__ import annotations

import pytest
import torch

from configs.numerics import Numerics
from model.batch import Segment, StepBatch
from model.step_plan import plan_step


def plan(*segments: Segment, numerics: Numerics = Numerics.FAST):
    num_tokens = sum(segment.num_tokens for segment in segments)
    token_ids = torch.zeros(num_tokens, dtype=torch.int64)
    batch = StepBatch(token_ids, segments, torch.tensor([num_tokens - 1]))
    return plan_step(batch, block_size=4, numerics=numerics)


def test_tokens_land_in_their_own_blocks() -> None:
    result = plan(Segment(0, 3, 3, False, 0, (5, 2)), Segment(3, 1, 8, True, 1, (7, 1, 9)))
    assert result.cache_rows_T.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 9 * 4]


def test_prefill_reads_its_whole_prefix_in_order() -> None:
    (prefill,) = plan(Segment(0, 2, 4, False, 3, (5, 2))).prefills
    assert prefill.cache_rows_L.tolist() == [20, 21, 22, 23, 8, 9]
    assert (prefill.stop, prefill.state_slot) == (2, 3)


def test_wave_holds_one_token_of_each_request() -> None:
    result = plan(
        Segment(0, 1, 5, True, 4, (0, 1)),
        Segment(1, 3, 2, True, 5, (2, 3)),
        Segment(4, 2, 1, True, 0, (4,)),
    )
    assert [wave.rows_B.tolist() for wave in result.decode_waves] == [[0, 1, 4], [2, 5], [3]]
    assert [wave.slots_B.tolist() for wave in result.decode_waves] == [[4, 5, 0], [5, 0], [5]]
    assert [wave.slot_range for wave in result.decode_waves] == [None, None, slice(5, 6)]


def test_neighbouring_slots_are_a_range() -> None:
    result = plan(Segment(0, 1, 0, True, 2, (0,)), Segment(1, 1, 0, True, 3, (1,)))
    assert result.decode_waves[0].slot_range == slice(2, 4)
    assert result.is_single_wave


def test_decode_tokens_of_like_length_share_a_group_and_a_mask() -> None:
    result = plan(
        Segment(0, 1, 2, True, 0, (3,)),
        Segment(1, 1, 3, True, 1, (4,)),
        Segment(2, 1, 30, True, 2, tuple(range(10, 18))),
    )
    near, far = result.decode_groups
    assert (near.rows_B.tolist(), near.cache_blocks_N.tolist(), near.span) == ([0, 1], [3, 4], 4)
    assert near.mask_B1L[:, 0].isinf().tolist() == [[False] * 3 + [True], [False] * 4]
    assert (far.rows_B.tolist(), far.span) == ([2], 31)


def test_short_tables_are_filled_with_their_own_block() -> None:
    (group,) = plan(
        Segment(0, 1, 4, True, 0, (3, 6)), Segment(1, 1, 7, True, 1, (4, 5))
    ).decode_groups
    assert group.cache_blocks_N.tolist() == [3, 6, 4, 5]
    (group,) = plan(
        Segment(0, 1, 8, True, 0, (3, 6, 7)), Segment(1, 1, 15, True, 1, (4, 5, 8, 9))
    ).decode_groups
    assert group.cache_blocks_N.tolist() == [3, 6, 7, 3, 4, 5, 8, 9]


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 32), (32, 32), (33, 64)])
def test_invariant_rows_are_padded_and_decode_tokens_attend_alone(
    num_tokens: int, num_rows: int
) -> None:
    segments = [Segment(i, 1, 0, True, i, (i,)) for i in range(num_tokens)]
    result = plan(*segments, numerics=Numerics.INVARIANT)
    assert (result.num_tokens, result.num_rows) == (num_tokens, num_rows)
    assert [group.rows_B.tolist() for group in result.decode_groups] == [
        [row] for row in range(num_tokens)
    ]
