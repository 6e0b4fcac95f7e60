from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from configs.numerics import FloatType
from router.combine import LatentSum, PartialSum
from router.dispatch_plan import WorkerPart
from router.pairs import NO_ORDER, PairOrder
from router.staging import TORCH_TYPES
from router.transport.base import Bytes


def to_bytes(values: Tensor) -> Bytes:
    return values.contiguous().view(torch.uint8).numpy().reshape(-1)


def add(adder: LatentSum, answers_KTL: Tensor, weights_KT: NDArray[np.float32]) -> Tensor:
    """Add answers that stand in a random order, as they do when several workers answer."""
    num_picks, num_tokens, latent_size = answers_KTL.shape
    positions = np.random.default_rng(0).permutation(num_picks * num_tokens)
    scattered = torch.empty(num_picks * num_tokens, latent_size, dtype=answers_KTL.dtype)
    scattered[torch.from_numpy(positions)] = answers_KTL.reshape(-1, latent_size)
    order = PairOrder(positions, np.ascontiguousarray(weights_KT).reshape(-1))
    return adder.add_pairs(to_bytes(scattered), order=order, num_tokens=num_tokens)


def add_one_by_one(answers_KTL: Tensor, weights_KT: NDArray[np.float32]) -> NDArray[np.float32]:
    """The slow twin: scalar float32 operations in ascending rank."""
    answers = answers_KTL.float().numpy()
    num_picks, num_tokens, latent_size = answers.shape
    sums = np.zeros((num_tokens, latent_size), np.float32)
    for token in range(num_tokens):
        for value in range(latent_size):
            total = np.float32(0)
            for pick in range(num_picks):
                total = total + answers[pick, token, value] * weights_KT[pick, token]
            sums[token, value] = total
    return sums


@pytest.mark.parametrize("wire_dtype", FloatType)
@pytest.mark.parametrize(
    ("num_picks", "num_tokens", "latent_size"),
    [(1, 3, 5), (2, 1, 1), (16, 1, 1), (4, 7, 33), (9, 5, 17)],
    ids=str,
)
def test_pairs_are_added_one_after_the_other(
    wire_dtype: FloatType, num_picks: int, num_tokens: int, latent_size: int
) -> None:
    torch.manual_seed(num_picks)
    shape = (num_picks, num_tokens, latent_size)
    answers = torch.randn(shape).to(TORCH_TYPES[wire_dtype])
    weights = torch.rand(num_picks, num_tokens).numpy()
    adder = LatentSum(latent_size=latent_size, wire_dtype=wire_dtype)
    sums = add(adder, answers, weights)
    assert np.array_equal(sums.numpy(), add_one_by_one(answers, weights))


@pytest.mark.parametrize("wire_dtype", FloatType)
def test_a_large_batch_has_the_bits_of_its_parts(wire_dtype: FloatType) -> None:
    # 96 tokens of 2048 values take the path that works in blocks, 2 tokens the other one.
    torch.manual_seed(0)
    answers = torch.randn(3, 96, 2048).to(TORCH_TYPES[wire_dtype])
    weights = torch.rand(3, 96).numpy()
    adder = LatentSum(latent_size=2048, wire_dtype=wire_dtype)
    whole = add(adder, answers, weights)
    for start in (0, 50, 94):
        part = add(adder, answers[:, start : start + 2], weights[:, start : start + 2])
        assert torch.equal(whole[start : start + 2], part)


def test_a_sum_is_the_callers_own() -> None:
    adder = LatentSum(latent_size=4, wire_dtype=FloatType.FLOAT32)
    weight = np.ones((1, 1), np.float32)
    first = add(adder, torch.ones(1, 1, 4), weight)
    add(adder, torch.zeros(1, 1, 4), weight)
    assert first.tolist() == [[1.0] * 4]


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_tokens_without_picks_sum_to_zero(num_tokens: int) -> None:
    adder = LatentSum(latent_size=4, wire_dtype=FloatType.BFLOAT16)
    sums = adder.add_pairs(np.empty(0, np.uint8), order=NO_ORDER, num_tokens=num_tokens)
    assert sums.tolist() == [[0.0] * 4] * num_tokens


def part(worker: int, rows: list[int] | None, num_rows: int) -> WorkerPart:
    return WorkerPart(
        worker=worker,
        num_rows=num_rows,
        rows_N=None if rows is None else np.array(rows),
        pairs_3Q=np.zeros((3, num_rows), np.uint32),
        positions_Q=None,
    )


@pytest.mark.parametrize("wire_dtype", FloatType)
def test_partial_sums_are_added_where_their_tokens_are(wire_dtype: FloatType) -> None:
    ones = to_bytes(torch.ones(3, 2, dtype=TORCH_TYPES[wire_dtype]))
    twos = to_bytes(torch.full((2, 2), 2.0, dtype=TORCH_TYPES[wire_dtype]))
    adder = LatentSum(latent_size=2, wire_dtype=wire_dtype)
    all_first = [PartialSum(part(0, None, 3), ones), PartialSum(part(1, [0, 2], 2), twos)]
    assert adder.add_partial_sums(all_first, num_tokens=3)[:, 0].tolist() == [3.0, 1.0, 3.0]
    all_last = all_first[::-1]
    assert adder.add_partial_sums(all_last, num_tokens=3)[:, 0].tolist() == [3.0, 1.0, 3.0]


def test_no_partial_sums_give_zeros() -> None:
    adder = LatentSum(latent_size=2, wire_dtype=FloatType.FLOAT32)
    assert adder.add_partial_sums([], num_tokens=2).tolist() == [[0.0, 0.0], [0.0, 0.0]]
