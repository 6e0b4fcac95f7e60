"""Routing, the latent path and the plain MLP."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from configs.errors import InvariantError
from configs.numerics import Numerics
from model.latent_moe import GluLayer, LatentMoeLayer, select_experts
from model.reference import ReferenceDispatcher
from tests.fakes.small_model import (
    GroupedDispatcher,
    RandomExperts,
    RandomTensors,
    small_dims,
)

MODES = pytest.mark.parametrize("numerics", list(Numerics), ids=lambda mode: mode.value)


def select(scores: torch.Tensor, bias: torch.Tensor, **changes: object):
    settings = {"num_picks": 2, "renormalize": True, "scaling_factor": 1.0} | changes
    return select_experts(scores, bias, **settings)


def test_bias_selects_but_does_not_weigh() -> None:
    scores = torch.tensor([[0.9, 0.5, 0.1]])
    expert_ids, weights = select(scores, torch.tensor([0.0, 0.0, 2.0]))
    assert expert_ids.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.9]]))


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_tied_scores_go_to_the_lower_expert_id_in_any_batch(num_rows: int) -> None:
    scores = torch.full((num_rows, 40), 0.25)
    scores[:, 39] = 0.5
    expert_ids, _ = select(scores, torch.zeros(40), num_picks=4)
    assert expert_ids.tolist() == [[39, 0, 1, 2]] * num_rows


def test_weights_sum_to_the_scaling_factor() -> None:
    _, weights = select(torch.rand(5, 9), torch.randn(9), num_picks=3, scaling_factor=2.5)
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 2.5))


@pytest.mark.parametrize(
    ("num_picks", "renormalize"), [(2, False), (1, True)], ids=["switched off", "single pick"]
)
def test_weights_are_raw_scores_without_renormalisation(num_picks: int, renormalize: bool) -> None:
    scores = torch.rand(4, 6)
    expert_ids, weights = select(
        scores, torch.zeros(6), num_picks=num_picks, renormalize=renormalize
    )
    assert torch.equal(weights, scores.gather(1, expert_ids))


def test_scores_of_zero_do_not_divide_by_zero() -> None:
    _, weights = select(torch.zeros(1, 4), torch.zeros(4))
    assert torch.equal(weights, torch.zeros(1, 2))


@MODES
def test_router_computes_in_float32_under_bfloat16(numerics: Numerics) -> None:
    dims = small_dims()
    weights = RandomTensors(0, torch.bfloat16).moe(dims)
    layer = LatentMoeLayer(weights, dims, numerics=numerics)
    h = torch.randn(32, 32).bfloat16()
    inputs = layer.prepare(h)
    scores = torch.sigmoid(h.float() @ weights.router.T)
    expected = (scores + weights.selection_bias).topk(3).indices
    assert torch.equal(inputs.expert_ids_TK, expected)
    assert inputs.weights_TK.dtype == torch.float32
    assert inputs.latents_TL.dtype == torch.bfloat16


@MODES
def test_merge_norms_the_sum_before_the_up_projection_and_adds_shared(numerics: Numerics) -> None:
    dims = small_dims()
    weights = RandomTensors(0, torch.float32).moe(dims)
    layer = LatentMoeLayer(weights, dims, numerics=numerics)
    u, shared = torch.randn(5, 16), torch.randn(5, 32)
    normed = u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights.latent_norm
    merged = layer.merge(u, shared, dtype=torch.float32)
    torch.testing.assert_close(merged, normed @ weights.up_proj.T + shared, rtol=1e-4, atol=1e-5)


def test_layer_without_norm_and_shared_experts_only_projects() -> None:
    dims = small_dims()
    dims = replace(dims, moe=replace(dims.moe, has_latent_norm=False, num_shared_experts=0))
    weights = RandomTensors(0, torch.float32).moe(dims)
    layer = LatentMoeLayer(weights, dims, numerics=Numerics.FAST)
    shared = layer.compute_shared(layer.prepare(torch.randn(5, 32)))
    u = torch.randn(5, 16)
    assert shared is None
    torch.testing.assert_close(layer.merge(u, shared, dtype=torch.float32), u @ weights.up_proj.T)


@MODES
def test_shared_experts_are_one_gated_mlp_on_the_full_width(numerics: Numerics) -> None:
    dims = small_dims()
    weights = RandomTensors(0, torch.float32).moe(dims)
    layer = LatentMoeLayer(weights, dims, numerics=numerics)
    h = torch.randn(32, 32)
    assert weights.shared is not None
    alone = GluLayer(weights.shared, dims, numerics=numerics).forward(h)
    torch.testing.assert_close(layer.compute_shared(layer.prepare(h)), alone)


def test_reference_dispatcher_adds_weighted_experts_in_ascending_id() -> None:
    calls: list[tuple[int, int]] = []

    def expert(layer: int, expert_id: int, z_NL: torch.Tensor) -> torch.Tensor:
        calls.append((layer, expert_id))
        return z_NL * expert_id

    dispatcher = ReferenceDispatcher(expert)
    ticket = dispatcher.begin(
        3, torch.ones(2, 4), torch.tensor([[5, 1], [2, 7]]), torch.tensor([[0.5, 2.0], [1.0, 1.0]])
    )
    assert ticket.is_ready()
    assert calls == [(3, 1), (3, 5), (3, 2), (3, 7)]
    assert dispatcher.finish(ticket)[:, 0].tolist() == [4.5, 9.0]


def test_grouped_dispatcher_of_the_tests_equals_the_reference_bit_for_bit() -> None:
    experts = RandomExperts(small_dims())
    z, weights = torch.randn(40, 16), torch.rand(40, 3)
    expert_ids = torch.rand(40, 9).topk(3).indices
    tickets = [
        dispatcher.begin(1, z, expert_ids, weights)
        for dispatcher in (ReferenceDispatcher(experts), GroupedDispatcher(experts))
    ]
    assert torch.equal(tickets[0].u_TL, tickets[1].u_TL)


def test_reference_dispatcher_refuses_a_foreign_ticket() -> None:
    class Foreign:
        layer = 1

        def is_ready(self) -> bool:
            return True

    with pytest.raises(InvariantError, match="Foreign"):
        ReferenceDispatcher(lambda layer, expert_id, z_NL: z_NL).finish(Foreign())
