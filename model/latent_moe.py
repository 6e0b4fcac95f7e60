"""The attention side of Stable LatentMoE, and the plain SiTU MLP.

The router and the shared experts see the full-width hidden; the routed experts live behind the
dispatcher and see latents only. Their sum comes back before the norm, because the norm is not
linear.

Shapes: T rows, D hidden size, L latent size, E experts, K picks per token.
Source: K3 report equations 11 and 13.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.numerics import Numerics
from model.dims import ModelDims
from model.linear import JoinedLinear, linear
from model.norm import rms_norm
from model.ops.constants import constant
from model.ops.pointwise import apply_pointwise
from model.situ import situ_glu
from model.weight_tree import GluWeights, LatentMoeWeights


class GluLayer:
    """A SiTU MLP at full width: a dense layer or the shared experts."""

    def __init__(self, weights: GluWeights, dims: ModelDims, *, numerics: Numerics) -> None:
        self._weights = weights
        self._dims = dims
        self._numerics = numerics
        self._in_proj = JoinedLinear((weights.gate_proj, weights.up_proj), numerics=numerics)

    def forward(self, h_TD: Tensor) -> Tensor:
        """Return `down(situ(gate h, up h))`."""
        return self.finish(*self._in_proj(h_TD))

    def finish(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return `down(situ(gate, up))` for projections made elsewhere."""
        activated = apply_pointwise(self._activate, gate, up, numerics=self._numerics)
        return linear(activated, self._weights.down_proj, numerics=self._numerics)

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """The gated activation with the model's constants."""
        dims = self._dims
        return situ_glu(gate, up, beta=dims.situ_beta, linear_beta=dims.situ_linear_beta)


def select_experts(
    scores_TE: Tensor,
    selection_bias_E: Tensor,
    *,
    num_picks: int,
    renormalize: bool,
    scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Pick experts by biased score and weigh them by unbiased score. Autograd-safe in the weights.

    Equal biased scores go to the lower expert id, whatever the batch.

    Args:
        scores_TE: Router scores in (0, 1), float32.
        selection_bias_E: Added for selection only.
        num_picks: K.
        renormalize: Divide the weights of a token by their sum; a single pick is left as it is.
        scaling_factor: Multiplies the weights.

    Returns:
        Expert ids `[T, K]`, best first, and weights `[T, K]` float32.
    """
    biased_TE = scores_TE + selection_bias_E
    # topk leaves the order of ties open; a stable sort keeps the lower id in front.
    expert_ids_TK = biased_TE.sort(dim=-1, descending=True, stable=True).indices[:, :num_picks]
    weights_TK = scores_TE.gather(1, expert_ids_TK)
    if renormalize and num_picks > 1:
        weights_TK = weights_TK / (
            weights_TK.sum(-1, keepdim=True) + constant(1e-20, weights_TK.device)
        )
    if scaling_factor != 1.0:
        weights_TK = weights_TK * scaling_factor
    return expert_ids_TK, weights_TK


@dataclass(frozen=True, slots=True)
class MoeInputs:
    """What a MoE layer makes of its input before the experts run."""

    latents_TL: Tensor
    """To the routed experts; compute dtype, contiguous."""
    expert_ids_TK: Tensor
    """int64, best first."""
    weights_TK: Tensor
    """float32."""
    shared_gate_up: tuple[Tensor, Tensor] | None
    """Projections of the shared experts; None without shared experts."""


class LatentMoeLayer:
    """Router, latent projections and shared experts of one layer."""

    def __init__(self, weights: LatentMoeWeights, dims: ModelDims, *, numerics: Numerics) -> None:
        self._weights = weights
        self._dims = dims
        self._numerics = numerics
        matrices = [weights.router, weights.down_proj]
        self._shared: GluLayer | None = None
        if weights.shared is not None:
            self._shared = GluLayer(weights.shared, dims, numerics=numerics)
            matrices += [weights.shared.gate_proj, weights.shared.up_proj]
        self._in_proj = JoinedLinear(matrices, numerics=numerics)

    def prepare(self, h_TD: Tensor) -> MoeInputs:
        """Route each row by its full-width hidden in float32 and project it to its latent."""
        moe = self._dims.moe
        logits_TE, latents_TL, *gate_up = self._in_proj(h_TD)
        expert_ids_TK, weights_TK = select_experts(
            apply_pointwise(torch.sigmoid, logits_TE, numerics=self._numerics),
            self._weights.selection_bias,
            num_picks=moe.num_experts_per_token,
            renormalize=moe.renormalize,
            scaling_factor=moe.routed_scaling_factor,
        )
        return MoeInputs(
            latents_TL=latents_TL.contiguous(),
            expert_ids_TK=expert_ids_TK,
            weights_TK=weights_TK,
            shared_gate_up=(gate_up[0], gate_up[1]) if gate_up else None,
        )

    def compute_shared(self, inputs: MoeInputs) -> Tensor | None:
        """The shared experts' output, None without shared experts."""
        if self._shared is None or inputs.shared_gate_up is None:
            return None
        return self._shared.finish(*inputs.shared_gate_up)

    def merge(self, u_TL: Tensor, shared_TD: Tensor | None, *, dtype: torch.dtype) -> Tensor:
        """Return `up(norm(u)) + shared`.

        Args:
            u_TL: Weighted sums of the routed experts, float32.
            shared_TD: As `compute_shared` returned it.
            dtype: Compute dtype.
        """
        u = u_TL.to(dtype)
        if self._weights.latent_norm is not None:
            u = rms_norm(u, self._weights.latent_norm, eps=self._dims.rms_norm_eps)
        routed_TD = linear(u, self._weights.up_proj, numerics=self._numerics)
        return routed_TD if shared_TD is None else routed_TD + shared_TD
