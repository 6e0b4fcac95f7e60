"""The pieces of MLA."""

from __future__ import annotations

import pytest
import torch

from configs.numerics import Numerics
from model.mla import attend_expanded, attend_plainly
from tests.fakes.small_model import RandomTensors, small_dims

MODES = pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)


def test_first_token_attends_to_itself_alone() -> None:
    weights = RandomTensors(0, torch.float32).mla(small_dims())
    cache = torch.randn(1, 24)
    output = attend_plainly(
        torch.randn(1, 2, 24), cache, weights.k_up_proj, weights.v_up_proj, position=0
    )
    torch.testing.assert_close(output[0], weights.v_up_proj @ cache[0, :16])


def test_shared_key_takes_part_raw_and_scores_are_scaled_by_the_whole_width() -> None:
    weights = RandomTensors(0, torch.float32).mla(small_dims())
    q, cache = torch.randn(1, 2, 24), torch.randn(3, 24)
    output = attend_plainly(q, cache, weights.k_up_proj, weights.v_up_proj, position=2)
    for h in range(2):
        keys = torch.cat([cache[:, :16] @ weights.k_up_proj[h].T, cache[:, 16:]], dim=1)
        probabilities = (keys @ q[0, h] * 24**-0.5).softmax(0)
        expected = probabilities @ (cache[:, :16] @ weights.v_up_proj[h].T)
        torch.testing.assert_close(output[0, h], expected)


@MODES
@pytest.mark.parametrize(
    ("position", "num_tokens"),
    [(0, 1), (0, 300), (16, 40), (112, 33), (480, 200)],
    ids=["one token", "several tiles", "off the tile", "over a tile edge", "long prefix"],
)
def test_expanded_form_equals_the_plain_one(
    numerics: Numerics, position: int, num_tokens: int
) -> None:
    weights = RandomTensors(0, torch.float32).mla(small_dims())
    end = position + num_tokens
    q, cache = torch.randn(num_tokens, 2, 24) * 3, torch.randn(end, 24)
    garbage = torch.cat([cache, torch.full((600, 24), 1e4)])
    output = attend_expanded(
        q,
        lambda first, num: garbage[first : first + num],
        weights,
        position=position,
        numerics=numerics,
    )
    expected = attend_plainly(q, cache, weights.k_up_proj, weights.v_up_proj, position=position)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_expanded_form_is_differentiable() -> None:
    weights = RandomTensors(0, torch.float32).mla(small_dims())
    gradients = []
    for form in ("expanded", "plain"):
        torch.manual_seed(0)
        q = torch.randn(20, 2, 24, requires_grad=True)
        cache = torch.randn(20, 24, requires_grad=True)
        if form == "plain":
            y = attend_plainly(q, cache, weights.k_up_proj, weights.v_up_proj, position=0)
        else:
            y = attend_expanded(
                q,
                lambda first, num, cache=cache: cache[first : first + num],
                weights,
                position=0,
                numerics=Numerics.FAST,
            )
        y.square().sum().backward()
        gradients.append((q.grad, cache.grad))
    for expanded, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(expanded, plain, rtol=1e-4, atol=1e-5)
