"""The decoder as a whole: goldens, segments, memory, the order of events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.errors import InvariantError
from configs.numerics import Numerics
from model.batch import Segment, StepBatch
from model.cache import allocate_memory
from model.checkpoint import Checkpoint
from model.decoder import Decoder, drive
from model.dims import ModelDims
from model.reference import ReferenceDispatcher, ReferenceTicket
from model.situ import situ_glu
from model.weight_tree import PackedMatrix
from tests.fakes.small_model import CPU, Part, SmallModel, block_table, random_tokens, small_dims

MODES = pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def unpack(matrix: Tensor | PackedMatrix) -> Tensor:
    """Decode MXFP4 by the table, low nibble first."""
    if not isinstance(matrix, PackedMatrix):
        return matrix
    nibbles = torch.stack([matrix.packed & 15, matrix.packed >> 4], dim=-1).flatten(1)
    scale = torch.exp2(matrix.scale.float() - 127).repeat_interleave(32, dim=1)
    return E2M1[nibbles.long()] * scale


class CheckpointExperts:
    """The routed experts of a checkpoint, dense, in float32; an `ExpertFunction`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._dims = checkpoint.dims
        self._weights = {}
        for layer in checkpoint.dims.moe_layers:
            for expert_id in range(checkpoint.dims.moe.num_experts):
                expert = checkpoint.load_expert(layer, expert_id, dtype=torch.float32, device=CPU)
                self._weights[layer, expert_id] = tuple(
                    unpack(matrix) for matrix in (expert.gate, expert.up, expert.down)
                )

    def __call__(self, layer: int, expert_id: int, z_NL: Tensor) -> Tensor:
        gate, up, down = self._weights[layer, expert_id]
        beta, linear_beta = self._dims.situ_beta, self._dims.situ_linear_beta
        return situ_glu(z_NL @ gate.T, z_NL @ up.T, beta=beta, linear_beta=linear_beta) @ down.T


@MODES
@pytest.mark.parametrize(
    ("name", "tolerance"), [("mini", 1e-3), ("mini-mxfp4", 5e-3)], ids=["mini", "mini-mxfp4"]
)
def test_golden_logits_and_greedy_tokens(
    golden_dir: Path, name: str, tolerance: float, numerics: Numerics
) -> None:
    checkpoint = Checkpoint.open(golden_dir / name)
    golden = np.load(golden_dir / name / "golden.npz")
    weights = checkpoint.load_attention_side(dtype=torch.float32, device=CPU)
    decoder = Decoder(checkpoint.dims, weights, numerics=numerics)
    dispatcher = ReferenceDispatcher(CheckpointExperts(checkpoint))
    memory = allocate_memory(
        checkpoint.dims, num_blocks=9, block_size=16, num_slots=2, dtype=torch.float32, device=CPU
    )

    def run(token_ids: list[int], position: int, *, is_decode: bool) -> Tensor:
        num = len(token_ids)
        segment = Segment(0, num, position, is_decode, 1, (3, 1, 4, 0, 5, 8, 2, 6, 7))
        batch = StepBatch(torch.tensor(token_ids), (segment,), torch.arange(num))
        with torch.inference_mode():
            return drive(decoder.run(batch, memory, dispatcher))

    prompt = golden["tokens"].tolist()
    logits = run(prompt, 0, is_decode=False)
    assert (logits - torch.from_numpy(golden["logits"])).abs().max() < tolerance
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(golden["greedy"]):
        position = len(prompt) + len(tokens) - 1
        tokens.append(int(run(tokens[-1:], position, is_decode=True)[0].argmax()))
    assert tokens == golden["greedy"].tolist()


@pytest.mark.parametrize(
    "dims",
    [
        small_dims(),
        replace(small_dims(), kda=replace(small_dims().kda, conv_kernel_size=3)),
        replace(small_dims(), mla=replace(small_dims().mla, q_lora_rank=None)),
        replace(small_dims(), num_dense_layers=3),
        replace(small_dims(), attn_res_block_size=3, situ_linear_beta=None),
        replace(small_dims(), moe=replace(small_dims().moe, num_shared_experts=0)),
    ],
    ids=["plain", "conv 3", "no q-LoRA", "dense 3", "block 3, no linear beta", "no shared"],
)
@MODES
def test_decode_form_equals_prefill_form(dims: ModelDims, numerics: Numerics) -> None:
    model = SmallModel.build(dims=dims, numerics=numerics)
    tokens = random_tokens(40, seed=1)
    expected = model.run(Part(0, tokens))[0]
    model = model.with_fresh_memory()
    model.run(Part(0, tokens[:21]))
    one_by_one = [model.run(Part(0, [tokens[p]], p, is_decode=True))[0] for p in range(21, 30)]
    replayed = model.run(Part(0, tokens[30:], 30, is_decode=True))[0]
    torch.testing.assert_close(torch.cat([*one_by_one, replayed]), expected[21:], rtol=0, atol=1e-4)


def test_segments_of_all_kinds_in_one_lane_equal_requests_alone() -> None:
    model = SmallModel.build()
    tokens = [random_tokens(60, seed=seed) for seed in range(4)]
    expected = [model.with_fresh_memory().run(Part(i, tokens[i]))[0] for i in range(4)]
    model.run(Part(2, tokens[2][:50]), Part(0, tokens[0][:7]))
    model.run(Part(3, tokens[3][:1]))
    mixed = model.run(
        Part(2, tokens[2][50:51], 50, is_decode=True),
        Part(0, tokens[0][7:40], 7),
        Part(3, tokens[3][1:4], 1, is_decode=True),
        Part(1, tokens[1]),
    )
    wanted = [expected[2][50:51], expected[0][7:40], expected[3][1:4], expected[1]]
    for logits, reference in zip(mixed, wanted, strict=True):
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-4)


def test_slots_that_lie_apart_decode_like_neighbours() -> None:
    model = SmallModel.build()
    tokens = [random_tokens(12, seed=seed) for seed in range(5)]
    for i in range(5):
        model.run(Part(i, tokens[i][:-1]))
    apart = model.run(*(Part(i, tokens[i][-1:], 11, is_decode=True) for i in (4, 0, 2)))
    for i, logits in zip((4, 0, 2), apart, strict=True):
        expected = model.with_fresh_memory().run(Part(i, tokens[i]))[0][-1:]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@MODES
def test_zeroed_slot_and_dirty_blocks_equal_fresh_memory(numerics: Numerics) -> None:
    model = SmallModel.build(numerics=numerics)
    tokens = random_tokens(30, seed=7)
    expected = model.run(Part(1, tokens))[0]
    model.run(Part(1, random_tokens(200, seed=8)))
    model.memory.kv_MNPC.normal_(std=1e3)
    model.memory.zero_slot(1)
    assert torch.equal(model.run(Part(1, tokens))[0], expected)


def test_only_wanted_rows_get_logits() -> None:
    model = SmallModel.build()
    tokens = random_tokens(9, seed=3)
    everything = model.run(Part(0, tokens))[0]
    segment = Part(1, tokens).segment(start=0)
    for rows in ([8], [2, 5], []):
        memory = model.with_fresh_memory().memory
        wanted = torch.tensor(rows, dtype=torch.int64)
        batch = StepBatch(torch.tensor(tokens), (segment,), wanted)
        with torch.inference_mode():
            dispatcher = ReferenceDispatcher(model.experts)
            logits = drive(model.decoder.run(batch, memory, dispatcher))
        assert logits.shape == (len(rows), 67)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, everything[rows], rtol=0, atol=1e-5)


@MODES
def test_bfloat16_model_stays_near_the_float32_one(numerics: Numerics) -> None:
    tokens = random_tokens(40, seed=2)
    precise = SmallModel.build(numerics=numerics).run(Part(0, tokens))[0]
    model = SmallModel.build(numerics=numerics, dtype=torch.bfloat16)
    model.run(Part(0, tokens[:39]))
    last = model.run(Part(0, tokens[39:], 39, is_decode=True))[0]
    similarity = torch.cosine_similarity(last, precise[39:], dim=1)
    assert similarity.item() > 0.98


class RecordingDispatcher:
    """Keeps what crosses the seam, in order; answers zeros."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.shapes: list[tuple[int, ...]] = []

    def begin(self, layer, z_TL, expert_ids_TK, weights_TK) -> ReferenceTicket:
        self.events.append(("begin", layer))
        self.shapes.append((*z_TL.shape, *expert_ids_TK.shape, *weights_TK.shape))
        assert z_TL.is_contiguous()
        assert expert_ids_TK.dtype == torch.int64
        assert weights_TK.dtype == torch.float32
        return ReferenceTicket(layer, torch.zeros(z_TL.shape))

    def finish(self, ticket) -> Tensor:
        self.events.append(("finish", ticket.layer))
        return ticket.u_TL


@MODES
def test_padding_is_never_dispatched_and_only_latents_are(numerics: Numerics) -> None:
    model = SmallModel.build(numerics=numerics)
    dispatcher = RecordingDispatcher()
    tokens = random_tokens(5, seed=0)
    batch = StepBatch(torch.tensor(tokens), (Part(0, tokens).segment(start=0),), torch.arange(5))
    with torch.inference_mode():
        drive(model.decoder.run(batch, model.memory, dispatcher))
    assert dispatcher.shapes == [(5, 16, 5, 3, 5, 3)] * 3


def test_lane_is_suspended_between_begin_and_finish_of_every_moe_layer() -> None:
    model = SmallModel.build()
    dispatcher = RecordingDispatcher()
    batch = StepBatch(torch.tensor([4]), (Part(0, [4]).segment(start=0),), torch.tensor([0]))
    lane = model.decoder.run(batch, model.memory, dispatcher)
    with torch.inference_mode():
        for layer in model.dims.moe_layers:
            assert next(lane).layer == layer
            assert dispatcher.events[-1] == ("begin", layer)
        with pytest.raises(StopIteration):
            next(lane)
    assert dispatcher.events == [
        (event, layer) for layer in model.dims.moe_layers for event in ("begin", "finish")
    ]


def test_interleaved_lanes_equal_lanes_one_after_the_other() -> None:
    model = SmallModel.build()
    prompt, decoded = random_tokens(20, seed=1), random_tokens(10, seed=2)
    model.run(Part(1, decoded[:9]))
    expected = [
        model.with_fresh_memory().run(Part(0, prompt))[0],
        model.with_fresh_memory().run(Part(1, decoded))[0][9:],
    ]
    parts = [Part(0, prompt), Part(1, decoded[9:], 9, is_decode=True)]
    dispatcher = ReferenceDispatcher(model.experts)
    lanes = []
    for part in parts:
        num = len(part.token_ids)
        segments = (part.segment(start=0),)
        batch = StepBatch(torch.tensor(part.token_ids), segments, torch.arange(num))
        lanes.append(model.decoder.run(batch, model.memory, dispatcher))
    with torch.inference_mode():
        for _ in model.dims.moe_layers:
            for lane in lanes:
                next(lane)
        logits = [drive(lane) for lane in lanes]
    for result, reference in zip(logits, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=1e-4)


def test_lane_closed_early_leaves_other_requests_as_they_were() -> None:
    model = SmallModel.build()
    model.run(Part(0, random_tokens(20, seed=1)))
    before = [x.clone() for x in (model.memory.state_ASHDD[:, 0], model.memory.conv_ASJ3HD[:, 0])]
    blocks_before = model.memory.kv_MNPC[:, list(block_table(0))].clone()
    part = Part(3, random_tokens(30, seed=2))
    batch = StepBatch(torch.tensor(part.token_ids), (part.segment(start=0),), torch.tensor([29]))
    lane = model.decoder.run(batch, model.memory, ReferenceDispatcher(model.experts))
    with torch.inference_mode():
        next(lane)
        next(lane)
        lane.close()
    assert torch.equal(model.memory.state_ASHDD[:, 0], before[0])
    assert torch.equal(model.memory.conv_ASJ3HD[:, 0], before[1])
    assert torch.equal(model.memory.kv_MNPC[:, list(block_table(0))], blocks_before)


@pytest.mark.parametrize(
    ("segments", "numerics", "message"),
    [
        ((Segment(0, 3, 0, False, 0, (0,)),), Numerics.FAST, "cover 3 rows of 4"),
        ((Segment(1, 3, 0, False, 0, (0,)),), Numerics.FAST, "expected row 0"),
        ((Segment(0, 4, 6, False, 0, (0,)),), Numerics.FAST, "does not cover 10 tokens"),
        ((Segment(0, 4, 17, False, 0, (0, 1, 2)),), Numerics.INVARIANT, "multiple of 16"),
    ],
    ids=["too few rows", "gap", "short block table", "off the grid"],
)
def test_malformed_batch_is_refused(
    segments: tuple[Segment, ...], numerics: Numerics, message: str
) -> None:
    model = SmallModel.build(numerics=numerics)
    batch = StepBatch(torch.tensor([1, 2, 3, 4]), segments, torch.tensor([3]))
    with pytest.raises(InvariantError, match=message):
        drive(model.decoder.run(batch, model.memory, ReferenceDispatcher(model.experts)))
