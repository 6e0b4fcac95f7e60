"""apply_pointwise and constant."""

from __future__ import annotations

import pytest
import torch

from configs.numerics import Numerics
from model.ops.constants import constant
from model.ops.pointwise import SERIAL_ELEMENTS, VECTOR_ELEMENTS, apply_pointwise


@pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)
@pytest.mark.parametrize("num_rows", [1, 100], ids=["short", "long"])
def test_result_equals_the_operation(numerics: Numerics, num_rows: int) -> None:
    x, y = torch.randn(num_rows, 700), torch.randn(num_rows, 700)
    result = apply_pointwise(torch.maximum, x[:, 3:500], y[:, 3:500], numerics=numerics)
    assert torch.equal(result, torch.maximum(x, y)[:, 3:500])


@pytest.mark.parametrize("width", [7, 200, 1000])
@pytest.mark.parametrize("op", [torch.sigmoid, torch.tanh, torch.exp], ids=lambda op: op.__name__)
def test_invariant_bits_do_not_depend_on_length_or_view(op, width: int) -> None:
    wide = torch.randn(128, width + 5)
    x = wide[:, :width]
    expected = apply_pointwise(op, x, numerics=Numerics.INVARIANT)
    assert torch.equal(apply_pointwise(op, x[32:64], numerics=Numerics.INVARIANT), expected[32:64])
    copied = x[:32].contiguous()
    assert torch.equal(apply_pointwise(op, copied, numerics=Numerics.INVARIANT), expected[:32])


def test_pieces_are_whole_vectors() -> None:
    assert SERIAL_ELEMENTS % VECTOR_ELEMENTS == 0


def test_long_invariant_tensor_is_differentiable() -> None:
    x = torch.randn(3, SERIAL_ELEMENTS, requires_grad=True)
    apply_pointwise(torch.exp, x, numerics=Numerics.INVARIANT).sum().backward()
    torch.testing.assert_close(x.grad, x.exp())


def test_constant_made_while_serving_can_be_used_in_training() -> None:
    with torch.inference_mode():
        value = constant(0.1234, torch.device("cpu"))
    x = torch.ones(2, requires_grad=True)
    (x * value).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 0.1234))
