"""Snapshots of nothing in particular."""

from __future__ import annotations

import numpy as np
import torch

from actors.engine.request_snapshot import RequestSnapshot
from model.cache import SlotCopy


def make_snapshot(
    num_tokens: int = 4, *, dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 6
) -> RequestSnapshot:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return RequestSnapshot(
        model=f"model-{seed}",
        num_prompt=max(1, num_tokens // 2),
        token_ids_T=np.arange(num_tokens, dtype=np.int32) + seed,
        slot=SlotCopy(draw(3, 2, 4, 4), draw(3, 3, 24).to(dtype)),
        tokens_MTC=draw(2, num_tokens, width).to(dtype),
    )


def same_bits(one: RequestSnapshot, other: RequestSnapshot) -> bool:
    pairs = [
        (one.slot.state_AHDD, other.slot.state_AHDD),
        (one.slot.conv_AJC, other.slot.conv_AJC),
        (one.tokens_MTC, other.tokens_MTC),
    ]
    return (
        (one.model, one.num_prompt) == (other.model, other.num_prompt)
        and one.token_ids_T.tolist() == other.token_ids_T.tolist()
        and all(
            a.shape == b.shape
            and a.dtype == b.dtype
            and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in pairs
        )
    )
