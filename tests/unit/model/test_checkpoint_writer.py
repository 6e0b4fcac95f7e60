"""The writer of random checkpoints: what it writes is whole, repeatable and in the layout."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from configs.errors import CheckpointError, ConfigError
from configs.numerics import FloatType
from model.checkpoint import Checkpoint
from model.checkpoint_spec import CheckpointSpec, demo_dims, demo_layer_kinds, make_config
from model.checkpoint_writer import checkpoint_bytes, write_checkpoint
from model.dims import LayerKind
from model.dims_reading import load_config, read_dims
from model.storage import StorageFormat, read_storage
from model.tokenizer import Tokenizer

DENSE = StorageFormat(FloatType.FLOAT32, has_packed_experts=False)


def varied_dims():
    """A shape unlike the demo's in every way that changes tensors."""
    dims = demo_dims()
    return replace(
        dims,
        vocab_size=600,
        num_dense_layers=2,
        situ_linear_beta=None,
        layer_kinds=(LayerKind.MLA, LayerKind.KDA, LayerKind.KDA, LayerKind.MLA, LayerKind.KDA),
        kda=replace(dims.kda, num_heads=3, head_dim=16, conv_kernel_size=3),
        mla=replace(dims.mla, num_heads=5, q_lora_rank=None, v_head_dim=24),
        moe=replace(
            dims.moe,
            num_experts=33,
            num_shared_experts=1,
            has_latent_norm=False,
            renormalize=False,
        ),
        eos_token_ids=(3, 4),
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "demo"
    write_checkpoint(folder, CheckpointSpec(), seed=0)
    return folder


@pytest.mark.parametrize("dims", [demo_dims(), varied_dims()], ids=["demo", "varied"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_config_reads_back_as_the_same_dims(dims, packed: bool) -> None:
    spec = CheckpointSpec(dims=dims, storage=replace(DENSE, has_packed_experts=packed))
    config = json.loads(json.dumps(make_config(spec)))
    assert read_dims(config) == dims
    assert read_storage(config) == spec.storage


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["single", "sharded"])
def test_any_shape_opens(tmp_path, packed: bool, is_sharded: bool) -> None:
    storage = replace(DENSE, has_packed_experts=packed)
    spec = CheckpointSpec(dims=varied_dims(), storage=storage, is_sharded=is_sharded)
    write_checkpoint(tmp_path / "c", spec, seed=0)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.dims == spec.dims
    assert checkpoint.storage == storage


def test_demo_stands_in_the_released_layout(demo) -> None:
    tensors = load_file(demo / "model.safetensors")
    assert all(name.startswith("language_model.") for name in tensors)
    layer = "language_model.model.layers.1."
    assert tensors[layer + "self_attn.A_log"].shape == (32,)
    assert not tensors[layer + "self_attn.A_log"][4:].any()
    float32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    endings = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    assert float32 == {name for name in tensors if name.endswith(endings)}
    packed = tensors[layer + "block_sparse_moe.experts.0.w1.weight_packed"]
    assert packed.dtype == torch.uint8


def test_demo_stops_at_the_end_of_a_message(demo) -> None:
    tokenizer = Tokenizer.load(demo)
    checkpoint = Checkpoint.open(demo)
    assert checkpoint.dims.eos_token_ids == (tokenizer.special_ids["<|end_of_msg|>"],)
    assert tokenizer.vocab_size == checkpoint.dims.vocab_size


def test_single_file_is_aligned(demo) -> None:
    data = (demo / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    sizes = {"F32": 4, "BF16": 2, "U8": 1}
    assert length % 8 == 0
    assert all(e["data_offsets"][0] % sizes[e["dtype"]] == 0 for e in header.values())


def test_shards_follow_the_layers(tmp_path) -> None:
    write_checkpoint(tmp_path / "c", CheckpointSpec(is_sharded=True), seed=0)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text("utf-8"))
    files = index["weight_map"]
    assert files["language_model.model.layers.2.input_layernorm.weight"].startswith(
        "model-00003-of"
    )
    assert files["language_model.lm_head.weight"].startswith("model-00010-of")
    assert index["metadata"]["total_size"] == checkpoint_bytes(CheckpointSpec())


def test_same_seed_gives_the_same_bytes(tmp_path, demo) -> None:
    write_checkpoint(tmp_path / "again", CheckpointSpec(), seed=0)
    write_checkpoint(tmp_path / "other", CheckpointSpec(), seed=1)
    files = [f / "model.safetensors" for f in (demo, tmp_path / "again", tmp_path / "other")]
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other


def test_progress_adds_up_to_the_announced_bytes(tmp_path) -> None:
    steps: list[int] = []

    class Progress:
        def advance(self, num_bytes: int) -> None:
            steps.append(num_bytes)

    spec = CheckpointSpec(has_vision=True)
    write_checkpoint(tmp_path / "c", spec, seed=0, progress=Progress())
    assert sum(steps) == checkpoint_bytes(spec)


def test_without_tokenizer_there_are_no_tokenizer_files(tmp_path) -> None:
    dims = replace(demo_dims(), vocab_size=64, eos_token_ids=(1,))
    write_checkpoint(tmp_path / "c", CheckpointSpec(dims=dims, has_tokenizer=False), seed=0)
    names = {file.name for file in (tmp_path / "c").iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_folder_that_holds_something_is_left_alone(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not empty; remove it"):
        write_checkpoint(tmp_path, CheckpointSpec(), seed=0)
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "keep"


def test_empty_folder_is_filled(tmp_path) -> None:
    (tmp_path / "c").mkdir()
    write_checkpoint(tmp_path / "c", CheckpointSpec(), seed=0)
    assert Checkpoint.open(tmp_path / "c").dims == demo_dims()


def test_writing_that_fails_leaves_nothing_behind(tmp_path) -> None:
    class Full:
        def advance(self, num_bytes: int) -> None:
            raise ConfigError("disk is full")

    with pytest.raises(ConfigError):
        write_checkpoint(tmp_path / "c", CheckpointSpec(), seed=0, progress=Full())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": replace(demo_dims(), vocab_size=511)}, "vocabulary of at least 512, not 511"),
        ({"a_log_length": 3}, "A_log of 4 heads cannot have length 3"),
        (
            {"dims": replace(demo_dims(), moe=replace(demo_dims().moe, latent_size=48))},
            "latent 48 and width 64 need multiples of 32",
        ),
    ],
    ids=["vocabulary", "a-log", "groups"],
)
def test_impossible_spec_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        CheckpointSpec(**changes)


def test_demo_pattern_ends_with_two_mla_layers() -> None:
    kinds = demo_layer_kinds(9)
    assert [i for i, kind in enumerate(kinds) if kind is LayerKind.MLA] == [3, 7, 8]


def test_written_config_is_nested_as_released(demo) -> None:
    config = load_config(demo)
    assert "quantization_config" not in config
    text = config["text_config"]
    assert isinstance(text, dict)
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert text["linear_attn_config"]["full_attn_layers"] == [4, 8, 9]
