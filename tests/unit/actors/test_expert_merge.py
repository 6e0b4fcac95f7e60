from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.expert_merge import (
    MAX_FAILURE_BYTES,
    Dispatch,
    make_answer,
    make_failure,
    merge_dispatches,
    parse_dispatch,
)
from configs.errors import FrameError
from configs.numerics import Combine, FloatType
from router.frames import FrameHeader, FrameKind, check_lengths
from router.staging import TORCH_TYPES, StagingRows
from router.transport.base import Bytes, Frame
from tests.fakes.frame_making import dispatch_header, pair_bytes


def dispatch_frame(
    z_NL: torch.Tensor,
    rows: list[int],
    experts: list[int],
    *,
    wire_dtype: FloatType = FloatType.FLOAT32,
    combine: Combine = Combine.CANONICAL,
) -> Frame:
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


def parse(z_NL: torch.Tensor, rows: list[int], experts: list[int], **options) -> Dispatch:
    return parse_dispatch(dispatch_frame(z_NL, rows, experts, **options))


def answer(dispatch: Dispatch, y_QL: torch.Tensor) -> tuple[FrameHeader, Bytes]:
    header = dispatch.header
    staging = StagingRows(row_size=header.latent_size, wire_dtype=header.wire_dtype)
    return make_answer(dispatch, y_QL, staging)


Z = torch.arange(6, dtype=torch.float32).reshape(2, 3)


@pytest.mark.parametrize("wire_dtype", FloatType)
def test_a_dispatch_is_read_back(wire_dtype: FloatType) -> None:
    # Three values of two bytes: the pairs behind them are not aligned to words.
    dispatch = parse(Z[:1], [0, 0], [4, 7], wire_dtype=wire_dtype)
    batch = merge_dispatches([dispatch])
    assert batch.experts_P.tolist() == [4, 7]
    assert dispatch.weights.tolist() == [0.5, 1.5]
    assert batch.gather(np.array([1, 0])).float().tolist() == [[0.0, 1.0, 2.0]] * 2


def test_merged_frames_keep_their_rows_and_order() -> None:
    batch = merge_dispatches([parse(Z, [0, 1], [3, 3]), parse(Z + 10, [1, 0, 1], [1, 2, 2])])
    assert batch.experts_P.tolist() == [3, 3, 1, 2, 2]
    assert batch.gather(np.arange(5))[:, 0].tolist() == [0.0, 3.0, 13.0, 10.0, 13.0]


def test_a_row_that_the_frame_does_not_have_is_named() -> None:
    with pytest.raises(FrameError, match="names row 2, the frame has 2 rows"):
        parse(Z, [0, 2], [1, 1])


def test_a_frame_of_another_kind_is_refused() -> None:
    header, payload = make_failure(dispatch_header(), "text")
    with pytest.raises(FrameError, match="this one is failure"):
        parse_dispatch(Frame(header, payload))


def test_an_empty_dispatch_has_an_empty_answer() -> None:
    dispatch = parse(Z[:0], [], [])
    header, payload = answer(dispatch, torch.empty(0, 3))
    assert (header.payload_bytes, payload.size) == (0, 0)


@pytest.mark.parametrize("wire_dtype", FloatType)
def test_a_canonical_answer_is_the_pairs_in_wire_dtype(wire_dtype: FloatType) -> None:
    dispatch = parse(Z, [0, 1, 1], [1, 0, 2], wire_dtype=wire_dtype)
    y_QL = torch.randn(3, 3)
    header, payload = answer(dispatch, y_QL)
    check_lengths(header)
    assert (header.kind, header.call) == (FrameKind.COMBINE, dispatch.header.call)
    found = torch.from_numpy(payload).view(TORCH_TYPES[wire_dtype]).view(3, 3)
    assert torch.equal(found, y_QL.to(TORCH_TYPES[wire_dtype]))


@pytest.mark.parametrize(
    "rows",
    [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 2, 1], [2, 2, 2, 0, 1, 0], [1, 1, 1, 1, 1, 1]],
    ids=["all-rows", "ragged", "repeated", "one-row"],
)
def test_a_presummed_answer_adds_the_weighted_pairs_of_a_row_in_their_order(
    rows: list[int],
) -> None:
    dispatch = parse(torch.zeros(3, 3), rows, list(range(6)), combine=Combine.PRESUM)
    y_QL = torch.randn(6, 3)
    header, payload = answer(dispatch, y_QL)
    check_lengths(header)
    expected = torch.zeros(3, 3)
    for row, y_L, weight in zip(rows, y_QL, dispatch.weights.tolist(), strict=True):
        expected[row] = expected[row] + y_L * weight
    assert torch.equal(torch.from_numpy(payload).view(torch.float32).view(3, 3), expected)


def test_summing_leaves_the_answers_alone() -> None:
    y_QL = torch.ones(2, 3)
    answer(parse(Z, [0, 1], [1, 1], combine=Combine.PRESUM), y_QL)
    assert torch.equal(y_QL, torch.ones(2, 3))


def test_a_failure_names_its_call_and_is_of_bounded_length() -> None:
    header, payload = make_failure(dispatch_header(step=3), "x" * 100_000)
    check_lengths(header)
    assert (header.kind, header.step) == (FrameKind.FAILURE, 3)
    assert payload.nbytes == header.payload_bytes == MAX_FAILURE_BYTES
