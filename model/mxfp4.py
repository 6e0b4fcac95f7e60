"""MXFP4: E2M1 values with one E8M0 scale per 32 inputs, as the released experts are stored.

Low nibble first: input column `2 i` is in the low half of byte `i`. Codes 0 to 7 are the positive
values, bit 3 is the sign. Scale code 255 is NaN (OCP MX 1.0), the others are `2^(code - 127)`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from configs.errors import CheckpointError
from model.storage import MXFP4_GROUP
from model.weight_tree import PackedMatrix

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_SCALE_BIAS = 127
_NAN_SCALE = 255
_MAX_EXPONENT_OF_E2M1 = 2  # of 4.0, the largest power of two that E2M1 holds
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def dequantize(matrix: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return the dense `[out, in]` matrix in `dtype` (float32 or bfloat16), on the same device.

    Exact: every product of an E2M1 value and a power of two in range is representable in both.
    """
    out_size, packed_size = matrix.packed.shape
    device = matrix.packed.device
    pairs = _pair_table(dtype, device).index_select(0, matrix.packed.reshape(-1).int())
    values = pairs.view(dtype).view(out_size, -1, MXFP4_GROUP)
    scales = _scale_table(dtype, device).index_select(0, matrix.scale.reshape(-1).int())
    return values.mul_(scales.view(out_size, -1, 1)).view(out_size, 2 * packed_size)


def quantize(weight: Tensor) -> PackedMatrix:
    """Round a dense `[out, in]` matrix to MXFP4.

    The scale of a group is the power of two that puts its largest magnitude into [4, 8), clipped to
    6; values round to nearest, ties to the even code (OCP MX 1.0, section 6.3).

    Raises:
        CheckpointError: `in` is not a multiple of the group, or a value is not finite.
    """
    out_size, in_size = weight.shape
    if in_size % MXFP4_GROUP:
        raise CheckpointError(
            f"an MXFP4 matrix needs a multiple of {MXFP4_GROUP} inputs, this one has {in_size}"
        )
    groups = weight.float().reshape(out_size, in_size // MXFP4_GROUP, MXFP4_GROUP)
    if not bool(groups.isfinite().all()):
        raise CheckpointError("an MXFP4 matrix needs finite values; the dense one holds NaN or inf")
    largest = groups.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _MAX_EXPONENT_OF_E2M1
    exponent = exponent.clamp(-_SCALE_BIAS, _NAN_SCALE - 1 - _SCALE_BIAS)
    magnitudes = torch.ldexp(groups, -exponent.unsqueeze(-1)).abs_()
    midpoints = torch.tensor(_MIDPOINTS, device=weight.device)
    below = torch.bucketize(magnitudes, midpoints, out_int32=True).to(torch.uint8)
    above = torch.bucketize(magnitudes, midpoints, out_int32=True, right=True).to(torch.uint8)
    # They differ on a tie only, by one; then the even one of the two is meant.
    codes = below + ((above - below) & below)
    codes |= groups.signbit().to(torch.uint8) << 3
    codes = codes.view(out_size, in_size)
    return PackedMatrix(
        packed=(codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous(),
        scale=(exponent + _SCALE_BIAS).to(torch.uint8).contiguous(),
    )


@lru_cache(maxsize=8)
def _pair_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each byte its two values, side by side in one integer: one lookup gives both."""
    values = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)])
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(dtype)
    carrier = torch.int64 if dtype.itemsize == 4 else torch.int32
    return pairs.view(carrier).view(256).to(device)


@lru_cache(maxsize=8)
def _scale_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    scales = torch.ldexp(torch.ones(256), torch.arange(256) - _SCALE_BIAS)
    scales[_NAN_SCALE] = torch.nan
    return scales.to(dtype).to(device)
