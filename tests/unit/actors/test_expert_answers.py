from __future__ import annotations

import pytest
import torch

from actors.expert_answers import MAX_FAILURE_BYTES, AnswerMaker, make_failure
from actors.expert_merge import Dispatch, parse_dispatch
from configs.numerics import Combine, FloatType
from router.frames import FrameHeader, FrameKind, check_lengths
from router.staging import TORCH_TYPES
from router.transport.base import Bytes
from tests.fakes.frame_making import dispatch_frame, dispatch_header

Z = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def parse(z_NL: torch.Tensor, rows: list[int], experts: list[int], **options) -> Dispatch:
    return parse_dispatch(dispatch_frame(z_NL, rows, experts, **options))


def answer(dispatch: Dispatch, y_QL: torch.Tensor) -> tuple[FrameHeader, Bytes]:
    return AnswerMaker(latent_size=3).make_answer(dispatch, y_QL)


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


@pytest.mark.parametrize("combine", Combine)
def test_answers_of_different_sizes_are_made_after_each_other(combine: Combine) -> None:
    maker = AnswerMaker(latent_size=3)
    for num_pairs in (4, 1, 9, 4):
        rows = list(range(num_pairs))
        dispatch = parse(torch.zeros(num_pairs, 3), rows, rows, combine=combine)
        y_QL = torch.randn(num_pairs, 3)
        _, payload = maker.make_answer(dispatch, y_QL)
        weights = torch.tensor([0.5 + i for i in rows])[:, None]
        expected = y_QL if combine is Combine.CANONICAL else y_QL * weights
        assert torch.equal(torch.from_numpy(payload).view(torch.float32).view(-1, 3), expected)


def test_a_large_presummed_answer_has_the_bits_of_its_parts() -> None:
    latent_size = 4096
    maker = AnswerMaker(latent_size=latent_size)
    rows = [*range(20), *range(0, 20, 3), *range(20)]
    z_NL = torch.zeros(20, latent_size)
    dispatch = parse(z_NL, rows, list(range(len(rows))), combine=Combine.PRESUM)
    y_QL = torch.randn(len(rows), latent_size)
    _, payload = maker.make_answer(dispatch, y_QL)
    whole = torch.from_numpy(payload.copy()).view(torch.float32).view(20, -1)
    for row in (0, 1, 19):
        expected = torch.zeros(latent_size)
        for pair in [i for i, own in enumerate(rows) if own == row]:
            expected = expected + y_QL[pair] * float(dispatch.weights[pair])
        assert torch.equal(whole[row], expected)
