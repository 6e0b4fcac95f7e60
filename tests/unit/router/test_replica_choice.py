from __future__ import annotations

import numpy as np

from router.replica_choice import choose_replica


def choose(positions: list[int], experts: list[int], copies: list[int]) -> list[int]:
    return choose_replica(
        token_positions_P=np.array(positions, np.uint32),
        experts_P=np.array(experts, np.uint32),
        num_copies_P=np.array(copies, np.int64),
    ).tolist()


def test_tokens_take_the_copies_in_turn() -> None:
    assert choose([0, 1, 2, 3], [0, 0, 0, 0], [3, 3, 3, 3]) == [0, 1, 2, 0]


def test_neighbouring_experts_start_at_different_copies() -> None:
    assert choose([0, 0], [4, 5], [2, 2]) == [0, 1]


def test_a_single_copy_is_always_taken() -> None:
    assert choose([0, 1, 2], [9, 9, 9], [1, 1, 1]) == [0, 0, 0]
