"""rms_norm and l2_normalize."""

from __future__ import annotations

import pytest
import torch

from model.norm import l2_normalize, rms_norm


def test_rms_norm_equals_its_formula() -> None:
    x, weight = torch.randn(5, 12), torch.randn(12)
    expected = weight * (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-5), expected)


def test_rms_norm_rounds_the_normalised_value_before_the_weight() -> None:
    x = torch.randn(64, 32).bfloat16()
    weight = torch.randn(32).bfloat16()
    v = x.float()
    rounded = (v * (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).bfloat16()
    assert torch.equal(rms_norm(x, weight, eps=1e-5), weight * rounded)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), eps=1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("eps", [1e-6, 1e-5], ids=["eps 1e-6", "eps 1e-5"])
def test_rms_norm_adds_epsilon_to_the_mean(eps: float) -> None:
    x = torch.full((1, 16), 1e-3)
    expected = 1e-3 / (1e-6 + eps) ** 0.5
    torch.testing.assert_close(rms_norm(x, torch.ones(16), eps=eps), torch.full_like(x, expected))


def test_l2_normalize_adds_epsilon_to_the_sum() -> None:
    x = torch.full((1, 16), 1e-4)
    expected = 1e-4 / (16e-8 + 1e-6) ** 0.5
    torch.testing.assert_close(l2_normalize(x), torch.full_like(x, expected))


def test_l2_normalize_applies_its_scale() -> None:
    x = torch.randn(3, 2, 8)
    scale = torch.tensor([0.5, 1.0]).view(2, 1)
    torch.testing.assert_close(l2_normalize(x, scale=scale), l2_normalize(x) * scale)


@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_gradient_passes_numeric_check(norm: str) -> None:
    x = torch.randn(3, 6, requires_grad=True)
    weight = torch.randn(6)

    def loss() -> torch.Tensor:
        y = rms_norm(x, weight, eps=1e-5) if norm == "rms" else l2_normalize(x)
        return (y * torch.arange(18.0).view(3, 6)).sum()

    loss().backward()
    assert x.grad is not None
    direction = torch.randn(3, 6)
    before = loss().item()
    with torch.no_grad():
        x += 1e-3 * direction
    slope = (loss().item() - before) / 1e-3
    assert slope == pytest.approx((x.grad * direction).sum().item(), rel=0.05, abs=0.2)
