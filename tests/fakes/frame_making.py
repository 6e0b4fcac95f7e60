"""Frames and headers with plausible values, for tests of the data plane."""

from __future__ import annotations

import numpy as np
import torch

from configs.ids import Epoch, Generation
from configs.numerics import Combine, FloatType
from router.frames import FrameHeader, FrameKind, dispatch_payload_bytes
from router.staging import TORCH_TYPES
from router.transport.base import Bytes, Frame


def dispatch_header(
    *,
    num_tokens: int = 1,
    num_pairs: int = 0,
    latent_size: int = 4,
    wire_dtype: FloatType = FloatType.FLOAT32,
    combine: Combine = Combine.CANONICAL,
    generation: int = 1,
    epoch: int = 1,
    step: int = 0,
    layer: int = 1,
    lane: int = 0,
    attempt: int = 0,
) -> FrameHeader:
    """Header of a dispatch with the payload length that its counts give."""
    return FrameHeader(
        kind=FrameKind.DISPATCH,
        generation=Generation(generation),
        epoch=Epoch(epoch),
        step=step,
        layer=layer,
        lane=lane,
        attempt=attempt,
        num_tokens=num_tokens,
        num_pairs=num_pairs,
        latent_size=latent_size,
        wire_dtype=wire_dtype,
        combine=combine,
        payload_bytes=dispatch_payload_bytes(
            num_tokens=num_tokens,
            num_pairs=num_pairs,
            latent_size=latent_size,
            wire_dtype=wire_dtype,
        ),
    )


def sized_header(num_bytes: int, *, step: int = 0, generation: int = 1) -> FrameHeader:
    """Header of a frame with `num_bytes` of payload (a multiple of 4)."""
    return dispatch_header(
        num_tokens=1, latent_size=num_bytes // 4, step=step, generation=generation
    )


def pattern(num_bytes: int, seed: int = 0) -> Bytes:
    """Bytes that differ by position and seed."""
    cycle = ((np.arange(251) * 7 + seed * 31) % 251).astype(np.uint8)
    return np.resize(cycle, num_bytes)


def pair_bytes(rows: list[int], experts: list[int], weights: list[float]) -> Bytes:
    """Pair records of a dispatch payload."""
    pairs = np.empty((3, len(rows)), np.uint32)
    pairs[0] = rows
    pairs[2] = experts
    pairs[1] = np.array(weights, np.float32).view(np.uint32)
    return pairs.reshape(-1).view(np.uint8)


def dispatch_frame(
    z_NL: torch.Tensor,
    rows: list[int],
    experts: list[int],
    *,
    wire_dtype: FloatType = FloatType.FLOAT32,
    combine: Combine = Combine.CANONICAL,
) -> Frame:
    """A dispatch of latents `[N, L]`; pair `i` has weight `0.5 + i`."""
    header = dispatch_header(
        num_tokens=z_NL.shape[0],
        num_pairs=len(rows),
        latent_size=z_NL.shape[1],
        wire_dtype=wire_dtype,
        combine=combine,
    )
    latents = z_NL.to(TORCH_TYPES[wire_dtype]).view(torch.uint8).numpy().reshape(-1)
    weights = [0.5 + i for i in range(len(rows))]
    return Frame(header, np.concatenate([latents, pair_bytes(rows, experts, weights)]))
