"""Opening and loading checkpoints: every variant of the layout, and every way to be wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.errors import CheckpointError, ModelConfigError
from configs.numerics import FloatType
from model.checkpoint import Checkpoint, tree_bytes
from model.checkpoint_spec import CheckpointSpec, demo_dims, demo_layer_kinds
from model.checkpoint_writer import write_checkpoint
from model.mxfp4 import dequantize
from model.storage import StorageFormat
from model.weight_tree import KdaWeights, LatentMoeWeights, MlaWeights, PackedMatrix

GOLDEN = Path(__file__).parents[2] / "golden"
CPU = torch.device("cpu")
P = "language_model.model.layers."


def small_spec(**changes: object) -> CheckpointSpec:
    """Four layers, six experts."""
    dims = demo_dims()
    dims = replace(
        dims,
        layer_kinds=demo_layer_kinds(4),
        moe=replace(dims.moe, num_experts=6, num_experts_per_token=2),
    )
    return replace(CheckpointSpec(dims=dims), **changes)


@pytest.fixture
def mini(tmp_path):
    """A copy of the golden checkpoint that a test may damage."""
    folder = tmp_path / "mini"
    shutil.copytree(GOLDEN / "mini", folder)
    return folder


def rewrite(folder: Path, change) -> None:
    """Apply a function to the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def all_tensors(node: object) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    if isinstance(node, tuple):
        return [tensor for child in node for tensor in all_tensors(child)]
    if hasattr(node, "__dataclass_fields__"):
        return [t for name in node.__dataclass_fields__ for t in all_tensors(getattr(node, name))]
    return []


class CountingProgress:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def advance(self, num_bytes: int) -> None:
        self.steps.append(num_bytes)


def test_kda_tensors_are_stacked_cut_and_exponentiated() -> None:
    weights = Checkpoint.open(GOLDEN / "mini").load_attention_side(dtype=torch.float32, device=CPU)
    raw = load_file(GOLDEN / "mini" / "model.safetensors")
    kda = weights.layers[1].attention
    assert isinstance(kda, KdaWeights)
    parts = [raw[f"{P}1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(kda.qkv_proj, torch.cat(parts))
    taps = [raw[f"{P}1.self_attn.{part}_conv1d.weight"][:, 0] for part in "qkv"]
    assert torch.equal(kda.conv, torch.cat(taps))
    stored = raw[f"{P}1.self_attn.A_log"]
    assert stored.shape == (32,)
    assert torch.equal(kda.decay_rate, stored[:2].exp())
    assert torch.equal(kda.gate_proj, raw[f"{P}1.self_attn.g_proj.weight"])


def test_mla_key_and_value_rows_are_parted_per_head() -> None:
    weights = Checkpoint.open(GOLDEN / "mini").load_attention_side(dtype=torch.float32, device=CPU)
    raw = load_file(GOLDEN / "mini" / "model.safetensors")
    mla = weights.layers[3].attention
    assert isinstance(mla, MlaWeights)
    rows = raw[f"{P}3.self_attn.kv_b_proj.weight"]
    assert torch.equal(mla.k_up_proj[1], rows[64:96])
    assert torch.equal(mla.v_up_proj[1], rows[96:128])


def test_residual_mixes_are_folded() -> None:
    weights = Checkpoint.open(GOLDEN / "mini").load_attention_side(dtype=torch.float32, device=CPU)
    raw = load_file(GOLDEN / "mini" / "model.safetensors")
    norm, proj = raw[f"{P}2.mlp_res_norm.weight"], raw[f"{P}2.mlp_res_proj.weight"]
    assert torch.equal(weights.layers[2].mlp_mix, norm * proj[0])


def test_float32_parts_stay_float32_in_bfloat16_compute() -> None:
    checkpoint = Checkpoint.open(GOLDEN / "mini-mxfp4")
    weights = checkpoint.load_attention_side(dtype=torch.bfloat16, device=CPU)
    layer = weights.layers[1]
    assert isinstance(layer.attention, KdaWeights)
    assert isinstance(layer.mlp, LatentMoeWeights)
    kept = [layer.attention_mix, layer.mlp_mix, weights.output_mix, layer.mlp.router]
    kept += [layer.mlp.selection_bias, layer.attention.conv, layer.attention.decay_bias]
    kept += [layer.attention.decay_rate, layer.attention.out_norm]
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert layer.attention.qkv_proj.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mini", "mini-mxfp4"])
def test_progress_adds_up_to_the_announced_bytes(name: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(GOLDEN / name)
    progress = CountingProgress()
    weights = checkpoint.load_attention_side(dtype=dtype, device=CPU, progress=progress)
    announced = checkpoint.attention_side_bytes(dtype)
    assert sum(progress.steps) == announced == tree_bytes(weights)
    assert len(progress.steps) == checkpoint.dims.num_layers + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_loaded_tensors_own_exactly_their_memory(dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(GOLDEN / "mini-mxfp4")
    weights = checkpoint.load_attention_side(dtype=dtype, device=CPU)
    expert = checkpoint.load_expert(1, 0, dtype=dtype, device=CPU)
    for tensor in [*all_tensors(weights), *all_tensors(expert)]:
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_packed_experts_stay_packed() -> None:
    expert = Checkpoint.open(GOLDEN / "mini-mxfp4").load_expert(
        2, 5, dtype=torch.float32, device=CPU
    )
    raw = load_file(GOLDEN / "mini-mxfp4" / "model.safetensors")
    prefix = f"{P}2.block_sparse_moe.experts.5."
    for matrix, name in ((expert.gate, "w1"), (expert.up, "w3"), (expert.down, "w2")):
        assert isinstance(matrix, PackedMatrix)
        assert torch.equal(matrix.packed, raw[f"{prefix}{name}.weight_packed"])
        assert torch.equal(matrix.scale, raw[f"{prefix}{name}.weight_scale"])


def test_dense_experts_are_cast() -> None:
    expert = Checkpoint.open(GOLDEN / "mini").load_expert(2, 5, dtype=torch.bfloat16, device=CPU)
    raw = load_file(GOLDEN / "mini" / "model.safetensors")
    down = raw[f"{P}2.block_sparse_moe.experts.5.w2.weight"]
    assert torch.equal(expert.down, down.to(torch.bfloat16))


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (9, 0), (1, 12), (1, -1)])
def test_absent_expert_is_reported_with_the_ranges(layer: int, expert: int) -> None:
    checkpoint = Checkpoint.open(GOLDEN / "mini")
    with pytest.raises(CheckpointError, match=r"experts are 0\.\.11 of layers 1\.\.8"):
        checkpoint.load_expert(layer, expert, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_sharded": True},
        {"has_prefix": False},
        {"has_vision": True},
        {"a_log_length": 4},
        {"a_log_length": 128},
    ],
    ids=["sharded", "no-prefix", "vision", "unpadded", "padded"],
)
def test_variants_of_the_layout_load_equal_weights(tmp_path, changes: dict) -> None:
    write_checkpoint(tmp_path / "plain", small_spec(), seed=1)
    write_checkpoint(tmp_path / "variant", small_spec(**changes), seed=1)
    plain, variant = (
        Checkpoint.open(tmp_path / name).load_attention_side(dtype=torch.float32, device=CPU)
        for name in ("plain", "variant")
    )
    pairs = zip(all_tensors(plain), all_tensors(variant), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_vision_tensors_are_skipped_and_counted(tmp_path) -> None:
    write_checkpoint(tmp_path / "seeing", small_spec(has_vision=True), seed=0)
    checkpoint = Checkpoint.open(tmp_path / "seeing")
    assert checkpoint.num_vision_tensors == 3
    assert not any("vision" in name for name in checkpoint.stored)


def test_old_names_of_residual_vectors_are_read(mini) -> None:
    before = Checkpoint.open(mini).load_attention_side(dtype=torch.float32, device=CPU)

    def rename(tensors: dict) -> None:
        for name in list(tensors):
            if name.endswith(("_res_proj.weight", "_res_norm.weight")):
                head, _, kind = name.removesuffix(".weight").rpartition("_")
                tensors[f"{head}.{kind}_weight"] = tensors.pop(name)

    rewrite(mini, rename)
    after = Checkpoint.open(mini).load_attention_side(dtype=torch.float32, device=CPU)
    assert torch.equal(before.layers[4].attention_mix, after.layers[4].attention_mix)
    assert torch.equal(before.output_mix, after.output_mix)


def test_layout_is_taken_from_the_files_not_from_the_config(mini) -> None:
    config = json.loads((mini / "config.json").read_text(encoding="utf-8"))
    packed = json.loads((GOLDEN / "mini-mxfp4" / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["quantization_config"] = packed["text_config"]["quantization_config"]
    (mini / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert not Checkpoint.open(mini).storage.has_packed_experts


def test_packed_experts_dequantize_to_the_rounded_dense_ones(tmp_path) -> None:
    dense = StorageFormat(FloatType.FLOAT32, has_packed_experts=False)
    write_checkpoint(tmp_path / "packed", small_spec(), seed=3)
    write_checkpoint(tmp_path / "dense", small_spec(storage=dense), seed=3)
    packed, plain = (
        Checkpoint.open(tmp_path / name).load_expert(1, 1, dtype=torch.float32, device=CPU)
        for name in ("packed", "dense")
    )
    assert isinstance(packed.gate, PackedMatrix)
    error = (dequantize(packed.gate, torch.float32) - plain.gate).abs().max()
    assert 0 < error < 0.2


def remove_one(tensors: dict) -> None:
    del tensors[f"{P}3.self_attn.g_proj.weight"]


def add_one(tensors: dict) -> None:
    tensors["language_model.model.mtp.weight"] = torch.zeros(3)


def flip_one(tensors: dict) -> None:
    name = "language_model.lm_head.weight"
    tensors[name] = tensors[name].T.contiguous()


def retype_one(tensors: dict) -> None:
    tensors[f"{P}0.self_attn.dt_bias"] = tensors[f"{P}0.self_attn.dt_bias"].double()


def shorten_a_log(tensors: dict) -> None:
    tensors[f"{P}0.self_attn.A_log"] = torch.zeros(1)


def drop_prefix_of_one(tensors: dict) -> None:
    tensors["lm_head.weight"] = tensors.pop("language_model.lm_head.weight")


def store_twice(tensors: dict) -> None:
    tensors[f"{P}0.mlp_res.norm_weight"] = torch.zeros(64)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (remove_one, "3.self_attn.g_proj.weight: expected BF16 or F32 [64, 64], found nothing"),
        (add_one, "model.mtp.weight: expected nothing, found F32 [3]"),
        (flip_one, "lm_head.weight: expected BF16 or F32 [320, 64], found F32 [64, 320]"),
        (retype_one, "dt_bias: expected BF16 or F32 [64], found F64 [64]"),
        (shorten_a_log, "A_log: expected BF16 or F32 [2] or longer, found F32 [1]"),
        (drop_prefix_of_one, "lm_head.weight: expected the prefix language_model."),
        (store_twice, "also stored as"),
    ],
    ids=["missing", "surplus", "flipped", "dtype", "a-log", "prefix", "twice"],
)
def test_wrong_tensor_is_listed_with_expected_and_found(mini, change, line: str) -> None:
    rewrite(mini, change)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(mini)
    assert line in caught.value.message
    assert "1 problem\n" in caught.value.message


def test_many_wrong_tensors_are_one_error_with_ten_lines(mini) -> None:
    rewrite(mini, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".2." in name])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(mini)
    lines = caught.value.message.splitlines()
    assert "problems" in lines[0]
    assert len(lines) == 12
    total = int(lines[0].split("config.json: ")[1].split()[0])
    assert lines[-1] == f"  and {total - 10} more"


def test_mixture_of_packed_and_dense_experts_is_refused(tmp_path) -> None:
    write_checkpoint(tmp_path / "c", small_spec(), seed=0)

    def unpack(tensors: dict) -> None:
        base = f"{P}1.block_sparse_moe.experts.0.w1."
        del tensors[base + "weight_packed"], tensors[base + "weight_scale"]
        tensors[base + "weight"] = torch.zeros(64, 64)

    rewrite(tmp_path / "c", unpack)
    with pytest.raises(CheckpointError, match=r"w1\.weight_packed: expected U8"):
        Checkpoint.open(tmp_path / "c")


def test_checkpoint_of_another_shape_is_refused(mini) -> None:
    shutil.copy(GOLDEN / "mini" / "config.json", mini / "config.json")
    config = json.loads((mini / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["num_experts"] = 13
    (mini / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"expected BF16 or F32 \[13, 64\], found F32 \[12"):
        Checkpoint.open(mini)


def test_checkpoint_of_another_model_type_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ModelConfigError, match="model_type is 'llama'"):
        Checkpoint.open(tmp_path)


def test_empty_folder_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)


def test_file_instead_of_a_folder_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        Checkpoint.open(GOLDEN / "mini" / "config.json")


def test_half_written_weights_are_refused(mini) -> None:
    file = mini / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="half-written"):
        Checkpoint.open(mini)
