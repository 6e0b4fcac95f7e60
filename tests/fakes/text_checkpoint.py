"""The smallest checkpoint that takes and gives text: random weights, byte-level vocabulary."""

from dataclasses import replace
from pathlib import Path

from model.checkpoint import Checkpoint
from model.checkpoint_spec import CheckpointSpec, demo_dims, demo_layer_kinds
from model.checkpoint_writer import write_checkpoint
from model.dims import KdaDims, MlaDims


def write_text_checkpoint(folder: Path, *, context_tokens: int = 2048) -> Checkpoint:
    """Write it into a new folder and open it."""
    dims = demo_dims()
    dims = replace(
        dims,
        hidden_size=32,
        dense_hidden_size=48,
        context_tokens=context_tokens,
        attn_res_block_size=2,
        layer_kinds=demo_layer_kinds(4),
        kda=KdaDims(num_heads=2, head_dim=16, conv_kernel_size=4, gate_lower_bound=-5.0),
        mla=MlaDims(
            num_heads=2,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            norm_eps=dims.mla.norm_eps,
        ),
        moe=replace(
            dims.moe, num_experts=6, num_experts_per_token=2, expert_hidden_size=32, latent_size=32
        ),
    )
    write_checkpoint(folder, CheckpointSpec(dims=dims), seed=0)
    return Checkpoint.open(folder)
