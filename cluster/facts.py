"""Reads what `configs/resolve.py` needs to know: the model's sizes and this machine."""

from __future__ import annotations

import os

import psutil
import torch

from configs.resolve import Facts
from configs.schema import ServingConfig
from model.cache import bytes_per_block, bytes_per_slot
from model.checkpoint import Checkpoint
from router.combine import TORCH_TYPES


def gather_facts(config: ServingConfig, checkpoint: Checkpoint) -> Facts:
    """Describe a checkpoint on this machine, in the configured compute dtype."""
    dtype = TORCH_TYPES[config.model.compute_dtype]
    dims = checkpoint.dims
    has_cuda = torch.cuda.is_available()
    on_gpu = has_cuda and config.model.device != "cpu"
    available = torch.cuda.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
    return Facts(
        num_cores=len(os.sched_getaffinity(0)),
        available_memory_bytes=available,
        has_cuda=has_cuda,
        attention_side_bytes=checkpoint.attention_side_bytes(dtype),
        expert_bytes=checkpoint.expert_bytes(dtype),
        num_experts=dims.moe.num_experts,
        num_moe_layers=len(dims.moe_layers),
        num_experts_per_token=dims.moe.num_experts_per_token,
        bytes_per_block=bytes_per_block(
            dims, block_size=config.attention_pool.block_tokens, dtype=dtype
        ),
        bytes_per_slot=bytes_per_slot(dims, dtype=dtype),
        model_context_tokens=dims.context_tokens,
    )
