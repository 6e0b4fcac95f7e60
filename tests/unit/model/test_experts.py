"""The routed experts against the plain formula, and the promise of invariant numerics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import InvariantError
from configs.numerics import Numerics
from model.checkpoint import Checkpoint
from model.experts import Activation, expert_ffn, grouped_expert_ffn
from model.mxfp4 import dequantize, quantize
from model.weight_tree import ExpertWeights

GOLDEN = Path(__file__).parents[2] / "golden"
ACTIVATION = Activation(beta=4.0, linear_beta=25.0)
LATENT, INNER = 64, 96


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_expert(*, seed: int, packed: bool, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    matrices = [
        random(INNER, LATENT, seed=seed) / 8,
        random(INNER, LATENT, seed=seed + 1) / 8,
        random(LATENT, INNER, seed=seed + 2) / 8,
    ]
    made = [quantize(m) if packed else m.to(dtype) for m in matrices]
    return ExpertWeights(gate=made[0], up=made[1], down=made[2])


def formula(expert: ExpertWeights, z: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Float64, one row at a time."""
    gate, up, down = (
        (m if isinstance(m, torch.Tensor) else dequantize(m, torch.float32)).double()
        for m in (expert.gate, expert.up, expert.down)
    )
    rows = []
    for row in z.double():
        a, b = gate @ row, up @ row
        if activation.linear_beta is not None:
            b = activation.linear_beta * torch.tanh(b / activation.linear_beta)
        rows.append(
            down @ (activation.beta * torch.tanh(a / activation.beta) * torch.sigmoid(a) * b)
        )
    return torch.stack(rows)


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("num_rows", [1, 5, 32, 33])
def test_equals_the_formula(numerics: Numerics, packed: bool, num_rows: int) -> None:
    expert = make_expert(seed=1, packed=packed)
    z = random(num_rows, LATENT, seed=9)
    y = expert_ffn(expert, z, activation=ACTIVATION, numerics=numerics)
    assert y.dtype == z.dtype
    torch.testing.assert_close(y.double(), formula(expert, z, ACTIVATION), rtol=1e-5, atol=1e-5)


def test_up_branch_is_untouched_without_linear_beta() -> None:
    expert = make_expert(seed=1, packed=False)
    activation = Activation(beta=4.0, linear_beta=None)
    z = random(3, LATENT, seed=2) * 20
    y = expert_ffn(expert, z, activation=activation, numerics=Numerics.FAST)
    torch.testing.assert_close(y.double(), formula(expert, z, activation), rtol=1e-5, atol=1e-4)


def test_bfloat16_latents_give_bfloat16_answers() -> None:
    expert = make_expert(seed=1, packed=True)
    z = random(4, LATENT, seed=3).bfloat16()
    y = expert_ffn(expert, z, activation=ACTIVATION, numerics=Numerics.FAST)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), formula(expert, z, ACTIVATION), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_no_rows_give_no_rows(numerics: Numerics) -> None:
    expert = make_expert(seed=1, packed=True)
    y = expert_ffn(expert, torch.zeros(0, LATENT), activation=ACTIVATION, numerics=numerics)
    assert y.shape == (0, LATENT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@settings(max_examples=25, deadline=None)
@given(num_before=st.integers(0, 70), num_after=st.integers(0, 40), seed=st.integers(0, 99))
def test_invariant_row_does_not_depend_on_its_neighbours(
    dtype: torch.dtype, num_before: int, num_after: int, seed: int
) -> None:
    expert = make_expert(seed=4, packed=True)
    row = random(1, LATENT, seed=5).to(dtype)
    others = random(num_before + num_after, LATENT, seed=seed).to(dtype) * 3
    mixed = torch.cat([others[:num_before], row, others[num_before:]])
    alone = expert_ffn(expert, row, activation=ACTIVATION, numerics=Numerics.INVARIANT)
    beside = expert_ffn(expert, mixed, activation=ACTIVATION, numerics=Numerics.INVARIANT)
    assert torch.equal(alone[0], beside[num_before])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_grouped_rows_equal_those_of_each_expert_alone(packed: bool) -> None:
    experts = [make_expert(seed=10 * i, packed=packed) for i in range(3)]
    z = random(9, LATENT, seed=6)
    y = grouped_expert_ffn(
        experts, z, [4, 0, 5], activation=ACTIVATION, numerics=Numerics.INVARIANT
    )
    first = expert_ffn(experts[0], z[:4], activation=ACTIVATION, numerics=Numerics.INVARIANT)
    last = expert_ffn(experts[2], z[4:], activation=ACTIVATION, numerics=Numerics.INVARIANT)
    assert torch.equal(y, torch.cat([first, last]))


def test_grouped_without_rows_is_empty() -> None:
    y = grouped_expert_ffn(
        [], torch.zeros(0, LATENT), [], activation=ACTIVATION, numerics=Numerics.FAST
    )
    assert y.shape == (0, LATENT)


@pytest.mark.parametrize("counts", [[3], [3, 2], [2, 2, 2]], ids=str)
def test_counts_must_fit_rows_and_experts(counts: list[int]) -> None:
    experts = [make_expert(seed=i, packed=False) for i in range(2)]
    with pytest.raises(InvariantError, match="2 experts"):
        grouped_expert_ffn(
            experts, torch.zeros(6, LATENT), counts, activation=ACTIVATION, numerics=Numerics.FAST
        )


def test_gradients_reach_dense_weights_and_latents() -> None:
    expert = make_expert(seed=1, packed=False)
    for matrix in (expert.gate, expert.up, expert.down):
        matrix.requires_grad_()
    z = random(3, LATENT, seed=2).requires_grad_()
    expert_ffn(expert, z, activation=ACTIVATION, numerics=Numerics.INVARIANT).sum().backward()
    for tensor in (z, expert.gate, expert.up, expert.down):
        assert tensor.grad is not None
        assert tensor.grad.abs().sum() > 0


def test_activation_is_that_of_the_model() -> None:
    assert Activation.of(Checkpoint.open(GOLDEN / "mini").dims) == ACTIVATION
