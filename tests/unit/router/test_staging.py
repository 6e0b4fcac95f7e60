from __future__ import annotations

import pytest
import torch

from configs.numerics import FloatType
from router.staging import TORCH_TYPES, StagingRows


@pytest.mark.parametrize("wire_dtype", FloatType)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_become_bytes_of_the_wire_dtype(wire_dtype: FloatType, dtype: torch.dtype) -> None:
    staging = StagingRows(row_size=5, wire_dtype=wire_dtype)
    values = torch.randn(3, 5).to(dtype)
    data = staging.stage(values)
    assert data.shape == (3, 5 * wire_dtype.num_bytes)
    expected = values.to(TORCH_TYPES[wire_dtype])
    assert data.tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_batches_of_every_size_are_staged_after_each_other() -> None:
    staging = StagingRows(row_size=3, wire_dtype=FloatType.FLOAT32)
    for num_rows in [2, 0, 7, 1, *range(100), 7]:
        values = torch.randn(num_rows, 3)
        assert staging.stage(values).tobytes() == values.numpy().tobytes()


def test_rows_need_not_be_contiguous() -> None:
    staging = StagingRows(row_size=3, wire_dtype=FloatType.FLOAT32)
    values = torch.randn(3, 4).T[:2]
    assert staging.stage(values).tobytes() == values.contiguous().numpy().tobytes()
