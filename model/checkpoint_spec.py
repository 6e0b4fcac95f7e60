"""What a checkpoint to be written looks like: a shape, and the variants of the released layout.

Makes `config.json` in K3's nesting; `model/dims_reading.py` reads back equal dims.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.errors import CheckpointError
from configs.numerics import FloatType
from model.dims import KdaDims, LayerKind, MlaDims, ModelDims, MoeDims
from model.dims_reading import MLA_NORM_EPS
from model.sizing import released_a_log_length
from model.storage import MXFP4_GROUP, StorageFormat
from model.tokenizer_files import BYTE_VOCAB_SIZE, END_OF_MESSAGE, FIRST_SPECIAL, special_id


def demo_layer_kinds(num_layers: int) -> tuple[LayerKind, ...]:
    """K3's pattern: every fourth layer is MLA, and the last one too."""
    return tuple(
        LayerKind.MLA if layer % 4 == 0 or layer == num_layers else LayerKind.KDA
        for layer in range(1, num_layers + 1)
    )


def demo_dims() -> ModelDims:
    """The smallest model that has every part: 9 layers, 16 experts, 3.1 million parameters.

    Two MLA layers adjoin and the last AttnRes block is short, as in K3.
    """
    return ModelDims(
        vocab_size=BYTE_VOCAB_SIZE,
        hidden_size=128,
        dense_hidden_size=256,
        num_dense_layers=1,
        context_tokens=4096,
        rms_norm_eps=1e-5,
        attn_res_block_size=4,
        situ_beta=2.0,
        situ_linear_beta=4.0,
        layer_kinds=demo_layer_kinds(9),
        kda=KdaDims(num_heads=4, head_dim=32, conv_kernel_size=4, gate_lower_bound=-5.0),
        mla=MlaDims(
            num_heads=4,
            q_lora_rank=64,
            kv_lora_rank=32,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            norm_eps=MLA_NORM_EPS,
        ),
        moe=MoeDims(
            num_experts=16,
            num_experts_per_token=4,
            num_shared_experts=2,
            expert_hidden_size=64,
            latent_size=64,
            has_latent_norm=True,
            renormalize=True,
            routed_scaling_factor=2.446,
        ),
        eos_token_ids=(special_id(END_OF_MESSAGE),),
    )


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """A checkpoint to be written. The defaults are the demo's."""

    dims: ModelDims = field(default_factory=demo_dims)
    storage: StorageFormat = field(
        default=StorageFormat(dtype=FloatType.BFLOAT16, has_packed_experts=True)
    )
    a_log_length: int | None = None
    """Stored length of A_log; None pads as the release does."""
    has_prefix: bool = True
    """Text tensors carry `language_model.`, as released."""
    is_sharded: bool = False
    """One file per layer, one for the rest, and an index; else a single file."""
    has_vision: bool = False
    """Add a few small tensors of a vision tower and projector."""
    has_tokenizer: bool = True
    """Add byte-level tokenizer files."""

    def __post_init__(self) -> None:
        """Check what cannot be written.

        Raises:
            CheckpointError: Names the value and what it must be.
        """
        moe, vocab_size = self.dims.moe, self.dims.vocab_size
        if self.storage.has_packed_experts:
            for size in (moe.latent_size, moe.expert_hidden_size):
                if size % MXFP4_GROUP:
                    raise CheckpointError(
                        f"packed experts of latent {moe.latent_size} and width "
                        f"{moe.expert_hidden_size} need multiples of {MXFP4_GROUP}"
                    )
        if self.has_tokenizer and vocab_size < BYTE_VOCAB_SIZE:
            raise CheckpointError(
                f"a checkpoint with byte-level tokenizer files needs a vocabulary of at least "
                f"{BYTE_VOCAB_SIZE}, not {vocab_size}"
            )
        if self.stored_a_log_length < self.dims.kda.num_heads:
            raise CheckpointError(
                f"A_log of {self.dims.kda.num_heads} heads cannot have length {self.a_log_length}"
            )

    @property
    def stored_a_log_length(self) -> int:
        """Length of A_log in the file."""
        return released_a_log_length(self.dims) if self.a_log_length is None else self.a_log_length


def make_config(spec: CheckpointSpec) -> dict[str, object]:
    """Return `config.json` of a spec, nested as the released one."""
    eos = spec.dims.eos_token_ids
    token_ids = {
        "bos_token_id": FIRST_SPECIAL if spec.has_tokenizer else 0,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos),
        "pad_token_id": spec.dims.vocab_size - 1,
    }
    config: dict[str, object] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        **token_ids,
        "dtype": spec.storage.dtype.value,
        "tie_word_embeddings": False,
        "text_config": _make_text_config(spec) | token_ids,
    }
    if spec.has_vision:
        config["vision_config"] = {"patch_size": 14, "vt_hidden_size": 1024}
    return config


def _make_text_config(spec: CheckpointSpec) -> dict[str, object]:
    dims, mla, moe = spec.dims, spec.dims.mla, spec.dims.moe
    text: dict[str, object] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "num_hidden_layers": dims.num_layers,
        "intermediate_size": dims.dense_hidden_size,
        "num_attention_heads": mla.num_heads,
        "num_key_value_heads": mla.num_heads,
        "hidden_act": "situ",
        "activation_situ_beta": dims.situ_beta,
        "activation_situ_linear_beta": dims.situ_linear_beta,
        "rms_norm_eps": dims.rms_norm_eps,
        "max_position_embeddings": dims.context_tokens,
        "attn_res_block_size": dims.attn_res_block_size,
        "tie_word_embeddings": False,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.expert_hidden_size,
        "routed_expert_hidden_size": moe.latent_size,
        "latent_moe_use_norm": moe.has_latent_norm,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": moe.renormalize,
        "topk_method": "noaux_tc",
        "routed_scaling_factor": moe.routed_scaling_factor,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": dims.num_dense_layers,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "dtype": spec.storage.dtype.value,
        "linear_attn_config": {
            "num_heads": dims.kda.num_heads,
            "head_dim": dims.kda.head_dim,
            "short_conv_kernel_size": dims.kda.conv_kernel_size,
            "use_full_rank_gate": True,
            "gate_lower_bound": dims.kda.gate_lower_bound,
            "full_attn_layers": [layer + 1 for layer in dims.mla_layers],
            "kda_layers": [layer + 1 for layer in dims.kda_layers],
        },
    }
    if spec.storage.has_packed_experts:
        text["quantization_config"] = _make_quantization_config()
    return text


def _make_quantization_config() -> dict[str, object]:
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP4_GROUP,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "scale_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "weights": weights,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
    }
