"""mix_rows."""

from __future__ import annotations

import pytest
import torch

from configs.numerics import Numerics
from model.attnres import mix_rows

MODES = pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)


def mix_in_float64(rows: list[torch.Tensor], vector: torch.Tensor) -> torch.Tensor:
    v = torch.stack(rows).double()
    scores = (v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * vector.double()).sum(-1)
    return (scores.softmax(0)[..., None] * v).sum(0)


@MODES
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_mix_equals_its_formula(numerics: Numerics, num_rows: int) -> None:
    rows = [torch.randn(7, 32) for _ in range(num_rows)]
    vector = torch.randn(32)
    mixed = mix_rows(rows, vector, eps=1e-5, numerics=numerics)
    torch.testing.assert_close(mixed.double(), mix_in_float64(rows, vector), rtol=1e-4, atol=1e-5)


@MODES
def test_single_row_is_returned_raw(numerics: Numerics) -> None:
    row = torch.randn(3, 16) * 100
    mixed = mix_rows([row], torch.randn(16), eps=1e-5, numerics=numerics)
    torch.testing.assert_close(mixed, row)


def test_bfloat16_rows_are_mixed_in_float32() -> None:
    rows = [torch.randn(5, 32).bfloat16() for _ in range(4)]
    vector = torch.randn(32)
    mixed = mix_rows(rows, vector, eps=1e-5, numerics=Numerics.INVARIANT)
    # One rounding at the end, plus what float32 sums leave: never two steps of bfloat16.
    torch.testing.assert_close(mixed, mix_in_float64(rows, vector).bfloat16(), rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("num_rows", [2, 5, 9])
def test_invariant_mix_of_a_token_does_not_depend_on_the_others(num_rows: int) -> None:
    rows = [torch.randn(64, 48) for _ in range(num_rows)]
    vector = torch.randn(48)
    together = mix_rows(rows, vector, eps=1e-5, numerics=Numerics.INVARIANT)
    for num_tokens in (1, 5, 33):
        fewer = [row[:num_tokens] for row in rows]
        alone = mix_rows(fewer, vector, eps=1e-5, numerics=Numerics.INVARIANT)
        assert torch.equal(together[:num_tokens], alone)


@MODES
def test_mix_is_differentiable_in_rows_and_vector(numerics: Numerics) -> None:
    rows = [torch.randn(2, 8, requires_grad=True) for _ in range(3)]
    vector = torch.randn(8, requires_grad=True)
    mix_rows(rows, vector, eps=1e-5, numerics=numerics).square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in [*rows, vector])
