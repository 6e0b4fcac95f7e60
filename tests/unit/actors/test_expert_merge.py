from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.expert_answers import make_failure
from actors.expert_merge import Dispatch, merge_dispatches, parse_dispatch
from configs.errors import FrameError
from configs.numerics import FloatType
from router.transport.base import Frame
from tests.fakes.frame_making import dispatch_frame, dispatch_header


def parse(z_NL: torch.Tensor, rows: list[int], experts: list[int], **options) -> Dispatch:
    return parse_dispatch(dispatch_frame(z_NL, rows, experts, **options))


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
