"""The memory a request has inside the model: paged MLA latents and one KDA + conv state slot.

Only the tensors. Who owns which block or slot is the engine's business (`actors/engine`).

Shapes: M MLA layers, N blocks, P tokens per block, C cache width; A KDA layers, S slots, H heads,
D head width, J conv taps - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.dims import ModelDims

_ALIGNMENT_BYTES = 64
"""As torch aligns its own tensors."""


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """KDA and conv state of one request at one position, on the processor's side. Never written."""

    state_AHDD: Tensor
    conv_AJC: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return self.state_AHDD.nbytes + self.conv_AJC.nbytes


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """All cache tensors of one attention worker. Written in place by the decoder."""

    kv_MNPC: Tensor
    """MLA cache per token: normed latent, then the shared key; compute dtype."""
    state_ASHDD: Tensor
    """KDA state `[key, value]` per head, float32."""
    conv_ASJ3HD: Tensor
    """Past pre-conv projections, oldest first: q channels, then k, then v; compute dtype."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.kv_MNPC.shape[2])

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return int(self.kv_MNPC.shape[1])

    @property
    def num_slots(self) -> int:
        """State slots in the pool."""
        return int(self.state_ASHDD.shape[1])

    def zero_slot(self, slot: int) -> None:
        """Clear the KDA and conv state of a slot, before it is handed to a new request."""
        self.state_ASHDD[:, slot].zero_()
        self.conv_ASJ3HD[:, slot].zero_()

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the KDA and conv state of one slot to another, bit by bit."""
        self.state_ASHDD[:, target].copy_(self.state_ASHDD[:, source])
        self.conv_ASJ3HD[:, target].copy_(self.conv_ASJ3HD[:, source])

    def read_slot(self, slot: int) -> SlotCopy:
        """Return a copy of the KDA and conv state of a slot."""
        return SlotCopy(
            self.state_ASHDD[:, slot].to("cpu", copy=True).contiguous(),
            self.conv_ASJ3HD[:, slot].to("cpu", copy=True).contiguous(),
        )

    def write_slot(self, slot: int, copy: SlotCopy) -> None:
        """Put a copy into a slot, bit by bit."""
        self.state_ASHDD[:, slot].copy_(copy.state_AHDD)
        self.conv_ASJ3HD[:, slot].copy_(copy.conv_AJC)

    def read_tokens(self, blocks: Sequence[int], num_tokens: int) -> Tensor:
        """Return a copy of the cache of the first `num_tokens` tokens of `blocks`, `[M, T, C]`."""
        num_blocks = -(-num_tokens // self.block_size)
        ids = torch.tensor(blocks[:num_blocks], dtype=torch.int64, device=self.kv_MNPC.device)
        tokens_MTC = self.kv_MNPC.index_select(1, ids).flatten(1, 2)[:, :num_tokens]
        return tokens_MTC.to("cpu").contiguous()

    def write_tokens(self, blocks: Sequence[int], tokens_MTC: Tensor) -> None:
        """Put a copy of the cache of tokens into the first of `blocks`, bit by bit."""
        size = self.block_size
        for index, start in enumerate(range(0, tokens_MTC.shape[1], size)):
            part = tokens_MTC[:, start : start + size]
            self.kv_MNPC[:, blocks[index], : part.shape[1]].copy_(part)

    def copy_block(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of one block to another, over all MLA layers."""
        self.kv_MNPC[:, target, :num_tokens].copy_(self.kv_MNPC[:, source, :num_tokens])


def allocate_memory(
    dims: ModelDims,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ModelMemory:
    """Allocate zeroed pools."""
    kda = dims.kda
    num_kda, num_mla = len(dims.kda_layers), len(dims.mla_layers)
    return ModelMemory(
        kv_MNPC=_lazy_zeros(
            (num_mla, num_blocks, block_size, dims.mla.cache_width), dtype=dtype, device=device
        ),
        state_ASHDD=torch.zeros(
            num_kda,
            num_slots,
            kda.num_heads,
            kda.head_dim,
            kda.head_dim,
            dtype=torch.float32,
            device=device,
        ),
        conv_ASJ3HD=torch.zeros(
            num_kda,
            num_slots,
            kda.conv_kernel_size - 1,
            3 * kda.inner_size,
            dtype=dtype,
            device=device,
        ),
    )


def _lazy_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros whose pages the system hands out on first use.

    `torch.zeros` writes them: 2 s per GiB at the start, and all of it resident for ever.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)


def bytes_per_block(dims: ModelDims, *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all MLA layers."""
    return len(dims.mla_layers) * block_size * dims.mla.cache_width * dtype.itemsize


def bytes_per_slot(dims: ModelDims, *, dtype: torch.dtype) -> int:
    """Bytes of one state slot over all KDA layers: float32 state plus conv history."""
    kda = dims.kda
    state = kda.num_heads * kda.head_dim * kda.head_dim * 4
    conv = (kda.conv_kernel_size - 1) * 3 * kda.inner_size * dtype.itemsize
    return len(dims.kda_layers) * (state + conv)
