"""linear and JoinedLinear."""

from __future__ import annotations

import pytest
import torch

from configs.numerics import Numerics
from model.linear import MAX_JOINED_BYTES, ROW_TILE, JoinedLinear, linear, pad_rows

MODES = pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@MODES
@pytest.mark.parametrize("num_rows", [0, 1, 31, 32, 33, 80])
def test_product_is_right_for_any_number_of_rows(numerics: Numerics, num_rows: int) -> None:
    x, weight = torch.randn(num_rows, 24), torch.randn(10, 24)
    torch.testing.assert_close(linear(x, weight, numerics=numerics), x @ weight.T)


@DTYPES
@pytest.mark.parametrize("num_outputs", [1, 7, 33, 64, 193])
def test_invariant_row_does_not_depend_on_its_batch(dtype: torch.dtype, num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(num_outputs)
    x = torch.randn(150, 72, generator=generator).to(dtype)
    weight = torch.randn(num_outputs, 72, generator=generator).to(dtype)
    expected = linear(x, weight, numerics=Numerics.INVARIANT)
    for num_rows in (1, 5, 32, 77):
        rows = torch.randperm(150, generator=generator)[:num_rows]
        assert torch.equal(linear(x[rows], weight, numerics=Numerics.INVARIANT), expected[rows])


def test_padding_is_zero_and_reaches_the_row_tile() -> None:
    padded = pad_rows(torch.ones(ROW_TILE + 1, 3))
    assert padded.shape[0] == 2 * ROW_TILE
    assert padded[ROW_TILE + 1 :].abs().sum() == 0


@MODES
@pytest.mark.parametrize("is_small", [True, False], ids=["joined", "apart"])
def test_joined_products_equal_separate_ones(numerics: Numerics, is_small: bool) -> None:
    num_inputs = 8 if is_small else MAX_JOINED_BYTES // 32
    weights = [torch.randn(num, num_inputs) for num in (3, 1, 5)]
    x = torch.randn(4, num_inputs)
    outputs = JoinedLinear(weights, numerics=numerics)(x)
    for y, weight in zip(outputs, weights, strict=True):
        torch.testing.assert_close(y, x @ weight.T, rtol=1e-4, atol=1e-2)


def test_matrices_of_different_types_are_not_joined() -> None:
    x = torch.randn(2, 8).bfloat16()
    float32, bfloat16 = JoinedLinear(
        [torch.randn(3, 8), torch.randn(3, 8).bfloat16()], numerics=Numerics.FAST
    )(x)
    assert (float32.dtype, bfloat16.dtype) == (torch.float32, torch.bfloat16)
