"""Model shapes beyond the two golden checkpoints, and how their weights are made.

`tools/make_golden_shapes.py` computes their logits and greedy tokens with an independent
implementation; tests write the same weights again and compare.
"""

from __future__ import annotations

from dataclasses import replace

from configs.numerics import FloatType
from model.checkpoint_spec import CheckpointSpec, demo_dims, demo_layer_kinds
from model.storage import StorageFormat

SEED = 11
NUM_PROMPT = 45
NUM_GREEDY = 32

_BASE = replace(
    demo_dims(), vocab_size=128, hidden_size=64, dense_hidden_size=96, eos_token_ids=(1,)
)
_DENSE32 = StorageFormat(dtype=FloatType.FLOAT32, has_packed_experts=False)
_PACKED16 = StorageFormat(dtype=FloatType.BFLOAT16, has_packed_experts=True)


def _spec(dims: object, storage: StorageFormat = _DENSE32, **options: object) -> CheckpointSpec:
    return CheckpointSpec(dims=dims, storage=storage, has_tokenizer=False, **options)


SHAPES: dict[str, CheckpointSpec] = {
    "other-head-counts": _spec(
        replace(
            _BASE,
            kda=replace(_BASE.kda, num_heads=5, head_dim=16),
            mla=replace(_BASE.mla, num_heads=3, qk_nope_head_dim=24, qk_rope_head_dim=8),
        )
    ),
    "conv-3": _spec(replace(_BASE, kda=replace(_BASE.kda, conv_kernel_size=3))),
    "no-q-lora": _spec(replace(_BASE, mla=replace(_BASE.mla, q_lora_rank=None))),
    "three-dense-layers": _spec(replace(_BASE, num_dense_layers=3), is_sharded=True),
    "one-shared-expert": _spec(replace(_BASE, moe=replace(_BASE.moe, num_shared_experts=1))),
    "33-packed-experts": _spec(
        replace(
            _BASE,
            layer_kinds=demo_layer_kinds(6),
            attn_res_block_size=2,
            moe=replace(_BASE.moe, num_experts=33, num_experts_per_token=5),
        ),
        _PACKED16,
        has_prefix=False,
    ),
}
