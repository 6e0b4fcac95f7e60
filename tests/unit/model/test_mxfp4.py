"""MXFP4 against an element-by-element twin."""

from __future__ import annotations

import math

import pytest
import torch

from configs.errors import CheckpointError
from model.mxfp4 import dequantize, quantize
from model.weight_tree import PackedMatrix

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def element(matrix: PackedMatrix, row: int, column: int) -> float:
    """One value, by the formula."""
    byte = int(matrix.packed[row, column // 2])
    nibble = byte & 15 if column % 2 == 0 else byte >> 4
    sign = -1.0 if nibble & 8 else 1.0
    code = int(matrix.scale[row, column // 32])
    scale = math.nan if code == 255 else math.ldexp(1.0, code - 127)
    return sign * E2M1[nibble & 7] * scale


def random_matrix(rows: int, columns: int) -> PackedMatrix:
    generator = torch.Generator().manual_seed(7)
    return PackedMatrix(
        packed=torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        scale=torch.randint(
            100, 150, (rows, columns // 32), dtype=torch.uint8, generator=generator
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_element_equals_the_formula(dtype: torch.dtype) -> None:
    matrix = random_matrix(5, 96)
    expected = torch.tensor([[element(matrix, r, c) for c in range(96)] for r in range(5)])
    assert torch.equal(dequantize(matrix, dtype), expected.to(dtype))


def test_low_nibble_is_the_even_column() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x7A  # low nibble 0xA: -1.0, high nibble 0x7: 6.0
    matrix = PackedMatrix(packed, torch.full((1, 1), 127, dtype=torch.uint8))
    assert dequantize(matrix, torch.float32)[0, :3].tolist() == [-1.0, 6.0, 0.0]


def test_scales_run_along_the_inputs() -> None:
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
    dense = dequantize(PackedMatrix(packed, scale), torch.float32)
    assert dense[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2, 2], [0.5, 0.5, 8, 8]]


@pytest.mark.parametrize("code", [0, 1, 254], ids=str)
def test_extreme_scales_are_exact(code: int) -> None:
    packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
    matrix = PackedMatrix(packed, torch.full((1, 1), code, dtype=torch.uint8))
    assert dequantize(matrix, torch.float32)[0, 0].item() == math.ldexp(1.0, code - 127)


def test_scale_code_255_is_nan() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    matrix = PackedMatrix(packed, torch.full((1, 1), 255, dtype=torch.uint8))
    assert dequantize(matrix, torch.float32).isnan().all()


def test_representable_values_survive_quantizing() -> None:
    values = torch.tensor([*E2M1, *(-v for v in E2M1)]).repeat(3, 4)
    weight = values * torch.tensor([0.25, 1.0, 1024.0])[:, None]
    assert torch.equal(dequantize(quantize(weight), torch.float32), weight)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0.0),
        (0.26, 0.5),
        (0.75, 1.0),
        (1.25, 1.0),
        (1.75, 2.0),
        (2.5, 2.0),
        (3.5, 4.0),
        (5.0, 4.0),
        (-5.1, -6.0),
        (7.9, 6.0),
    ],
)
def test_rounds_to_nearest_with_ties_to_even_codes(value: float, rounded: float) -> None:
    weight = torch.full((1, 32), value)
    weight[0, 0] = 4.0  # pins the scale of the group to 1
    assert dequantize(quantize(weight), torch.float32)[0, 1].item() == rounded


def test_no_other_code_is_nearer() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).clamp(-2.9, 2.9)
    matrix = quantize(weight)
    scale = torch.exp2(matrix.scale.float() - 127).repeat_interleave(32, dim=1)
    grid = torch.tensor([*E2M1, *(-v for v in E2M1)])
    distance = (weight[..., None] - grid * scale[..., None]).abs().amin(-1)
    assert torch.equal((dequantize(matrix, torch.float32) - weight).abs(), distance)


def test_zero_matrix_stays_zero() -> None:
    assert not dequantize(quantize(torch.zeros(2, 32)), torch.float32).any()


def test_inputs_must_fill_groups() -> None:
    with pytest.raises(CheckpointError, match="multiple of 32 inputs, this one has 48"):
        quantize(torch.zeros(2, 48))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(CheckpointError, match="finite"):
        quantize(torch.full((1, 32), value))
