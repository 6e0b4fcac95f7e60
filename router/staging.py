"""Memory that is a tensor and bytes at once, kept for reuse.

Turning a tensor into bytes or back takes several torch calls, and a torch call on a small batch
costs more than the copy. Views of one memory, made once per batch size, leave one call: the copy,
which casts and fetches from a GPU on the way.

Shapes: N rows, L values of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.numerics import FloatType
from router.transport.base import Bytes

TORCH_TYPES = {FloatType.FLOAT32: torch.float32, FloatType.BFLOAT16: torch.bfloat16}
_KEPT_SIZES = 64


class StagingRows:
    """Rows of one width and wire dtype on the CPU. Owned by one thread."""

    def __init__(self, *, row_size: int, wire_dtype: FloatType) -> None:
        """Prepare for rows of `row_size` values."""
        self._row_size = row_size
        self._memory = torch.empty(0, row_size, dtype=TORCH_TYPES[wire_dtype])
        self._views: dict[int, tuple[Tensor, Bytes]] = {}

    def views(self, num_rows: int) -> tuple[Tensor, Bytes]:
        """Return the first rows as a tensor `[N, L]` and as bytes `[N, bytes of a row]`.

        Every call returns the same memory; it may move when a larger batch comes.
        """
        views = self._views.get(num_rows)
        if views is None:
            if num_rows > self._memory.shape[0]:
                self._memory = self._memory.new_empty(num_rows, self._row_size)
                self._views.clear()
            elif len(self._views) >= _KEPT_SIZES:
                self._views.clear()
            rows = self._memory[:num_rows]
            row_bytes = self._row_size * self._memory.element_size()
            data: Bytes = rows.view(-1).view(torch.uint8).numpy().reshape(num_rows, row_bytes)
            views = (rows, data)
            self._views[num_rows] = views
        return views

    def stage(self, values_NL: Tensor) -> Bytes:
        """Copy rows of any float type and device in; return their bytes, until the next call."""
        rows, data = self.views(values_NL.shape[0])
        rows.copy_(values_NL)
        return data
