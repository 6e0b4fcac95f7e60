"""The pieces of KDA."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from configs.errors import ModelConfigError
from configs.numerics import Numerics
from model.kda import (
    CHUNK_TOKENS,
    DeltaInputs,
    chunk_kda,
    compute_log_decay,
    convolve_sequence,
    convolve_step,
    recur_kda,
)
from model.kda_layer import KdaLayer
from tests.fakes.small_model import RandomTensors, small_dims


def draw_inputs(num_tokens: int, *, heads: int = 2, width: int = 8, seed: int = 0) -> DeltaInputs:
    g = torch.Generator().manual_seed(seed)

    def unit(scale: float) -> torch.Tensor:
        x = torch.randn(num_tokens, heads, width, generator=g)
        return x / x.norm(dim=-1, keepdim=True) * scale

    return DeltaInputs(
        q=unit(width**-0.5),
        k=unit(1.0),
        v=torch.randn(num_tokens, heads, width, generator=g),
        log_decay=-5 * torch.rand(num_tokens, heads, width, generator=g),
        beta=torch.rand(num_tokens, heads, generator=g),
    )


def test_recurrence_of_one_token_equals_the_report_equation() -> None:
    inputs = draw_inputs(1)
    state = torch.randn(2, 8, 8)
    output, new_state = recur_kda(inputs, state)
    for h in range(2):
        k, beta = inputs.k[0, h], inputs.beta[0, h]
        decayed = torch.diag(inputs.log_decay[0, h].exp()) @ state[h]
        keep = torch.eye(8) - beta * torch.outer(k, k)
        expected = keep @ decayed + beta * torch.outer(k, inputs.v[0, h])
        torch.testing.assert_close(new_state[h], expected)
        torch.testing.assert_close(output[0, h], expected.T @ inputs.q[0, h])


def test_log_decay_is_bounded_and_uses_the_rate_inside_the_sigmoid() -> None:
    z, bias, rate = torch.randn(3, 4) * 50, torch.randn(4), torch.tensor([0.5, 0.5, 3.0, 3.0])
    decay = compute_log_decay(z, bias, rate, lower_bound=-5.0, numerics=Numerics.FAST)
    torch.testing.assert_close(decay, -5 * torch.sigmoid(rate * (z + bias)))
    assert decay.min() >= -5
    assert decay.max() <= 0


@pytest.mark.parametrize("num_taps", [1, 3, 4])
def test_last_tap_meets_the_current_token(num_taps: int) -> None:
    x, taps = torch.randn(6, 5), torch.randn(5, num_taps)
    padded = torch.cat([torch.zeros(num_taps - 1, 5), x])
    expected = torch.stack(
        [sum(taps[:, j] * padded[t + j] for j in range(num_taps)) for t in range(6)]
    )
    u, history = convolve_sequence(x, torch.zeros(num_taps - 1, 5), taps)
    torch.testing.assert_close(u, expected)
    assert torch.equal(history, padded[6:])


@pytest.mark.parametrize("split", [1, 2, 5])
def test_convolution_carries_its_history_over_a_split(split: int) -> None:
    x, taps = torch.randn(6, 5), torch.randn(5, 4)
    whole, last = convolve_sequence(x, torch.zeros(3, 5), taps)
    first, history = convolve_sequence(x[:split], torch.zeros(3, 5), taps)
    second, history = convolve_sequence(x[split:], history, taps)
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(history, last)


def test_convolution_step_equals_a_sequence_of_one() -> None:
    x, history, taps = torch.randn(3, 5), torch.randn(3, 3, 5), torch.randn(5, 4)
    u, new_history = convolve_step(x, history, taps)
    for b in range(3):
        expected, kept = convolve_sequence(x[b : b + 1], history[b], taps)
        torch.testing.assert_close(u[b], expected[0])
        assert torch.equal(new_history[b], kept)


def test_strongest_decay_keeps_a_tile_finite_and_right() -> None:
    inputs = draw_inputs(3 * CHUNK_TOKENS, width=32)
    inputs = replace(inputs, log_decay=torch.full_like(inputs.log_decay, -5.0))
    state = torch.randn(2, 32, 32)
    output, new_state = chunk_kda(inputs, state, numerics=Numerics.FAST)
    expected, expected_state = recur_kda(inputs, state)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(new_state, expected_state, rtol=1e-4, atol=1e-5)


def test_repeated_key_without_decay_stays_accurate() -> None:
    # Powers of the tile matrix grow like binomials here; a solve does not care.
    inputs = draw_inputs(2 * CHUNK_TOKENS)
    inputs = replace(
        inputs,
        k=inputs.k[:1].expand_as(inputs.k),
        log_decay=torch.zeros_like(inputs.log_decay),
        beta=torch.full_like(inputs.beta, 0.999),
    )
    state = torch.randn(2, 8, 8)
    output, _ = chunk_kda(inputs, state, numerics=Numerics.FAST)
    torch.testing.assert_close(output, recur_kda(inputs, state)[0], rtol=1e-4, atol=1e-5)


def test_chunk_form_is_differentiable_like_the_recurrence() -> None:
    gradients = []
    for form in ("chunk", "token by token"):
        inputs = draw_inputs(20)
        leaves = [
            x.requires_grad_()
            for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta)
        ]
        state = torch.ones(2, 8, 8, requires_grad=True)
        output, new_state = (
            chunk_kda(inputs, state, numerics=Numerics.FAST)
            if form == "chunk"
            else recur_kda(inputs, state)
        )
        (output.square().sum() + new_state.square().sum()).backward()
        gradients.append([leaf.grad for leaf in [*leaves, state]])
    for chunked, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-3, atol=1e-4)


def test_decay_too_strong_for_a_tile_is_refused() -> None:
    dims = small_dims()
    weights = RandomTensors(0, torch.float32).kda(dims)
    with pytest.raises(ModelConfigError, match=r"gate_lower_bound is -6\.0"):
        KdaLayer(
            weights,
            replace(dims.kda, gate_lower_bound=-6.0),
            norm_eps=1e-5,
            numerics=Numerics.FAST,
        )
