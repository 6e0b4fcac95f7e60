"""One gated MLA layer over the requests of a lane: projections, cache, and both attention forms.

Shapes: T rows of the lane, D hidden size, N blocks, P tokens per block, C cache width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from configs.numerics import Numerics
from model.dims import MlaDims
from model.linear import JoinedLinear, linear
from model.mla import attend_absorbed, attend_expanded
from model.norm import rms_norm
from model.ops.pointwise import apply_pointwise
from model.step_plan import PrefillPlan, StepPlan
from model.weight_tree import MlaWeights


class MlaLayer:
    """The MLA attention of one decoder layer."""

    def __init__(self, weights: MlaWeights, dims: MlaDims, *, numerics: Numerics) -> None:
        self._weights = weights
        self._dims = dims
        self._numerics = numerics
        self._in_proj = JoinedLinear(
            (
                weights.kv_down_proj,
                weights.gate_proj,
                weights.q_up_proj if weights.q_down_proj is None else weights.q_down_proj,
            ),
            numerics=numerics,
        )

    def forward(self, x_TD: Tensor, plan: StepPlan, pool_NPC: Tensor) -> Tensor:
        """Return the attention of the lane's tokens and write their latents to the cache.

        Args:
            x_TD: Normed layer input; `plan.num_rows` rows.
            plan: Of this lane.
            pool_NPC: The layer's blocks; the lane's own blocks are written.
        """
        numerics = self._numerics
        kv_TC, gate_TC, q_TC = self._in_proj(x_TD)
        latent_rows_C = pool_NPC.view(-1, pool_NPC.shape[2])
        # Padding takes part in the norm, so that no row lies in a tail, and is cut behind it.
        latents_TC = self._make_latents(kv_TC)[: plan.num_tokens]
        latent_rows_C.index_copy_(0, plan.cache_rows_T, latents_TC)
        o_TC = self._attend(self._make_queries(q_TC), plan, pool_NPC).flatten(1)
        gate_TC = apply_pointwise(torch.sigmoid, gate_TC.float(), numerics=numerics)
        o_TC = (o_TC * gate_TC).to(x_TD.dtype)
        return linear(o_TC, self._weights.out_proj, numerics=numerics)

    def _make_queries(self, q_TC: Tensor) -> Tensor:
        """Queries `[T, H, nope + rope]`, from the bottleneck where there is one."""
        if self._weights.q_down_norm is not None:
            q_TC = rms_norm(q_TC, self._weights.q_down_norm, eps=self._dims.norm_eps)
            q_TC = linear(q_TC, self._weights.q_up_proj, numerics=self._numerics)
        return q_TC.reshape(q_TC.shape[0], self._dims.num_heads, -1)

    def _make_latents(self, kv_TC: Tensor) -> Tensor:
        """What the cache holds of each token: the normed latent, then the raw shared key."""
        latent, shared = kv_TC.split_with_sizes(
            (self._dims.kv_lora_rank, self._dims.qk_rope_head_dim), dim=1
        )
        latent = rms_norm(latent, self._weights.kv_down_norm, eps=self._dims.norm_eps)
        return torch.cat((latent, shared), dim=1)

    def _attend(self, q_THX: Tensor, plan: StepPlan, pool_NPC: Tensor) -> Tensor:
        """Run every segment in its form. Padding rows come back as zeros."""
        if plan.is_single_wave and len(plan.decode_groups) == 1:
            return attend_absorbed(
                q_THX, pool_NPC, plan.decode_groups, self._weights, numerics=self._numerics
            )
        shape = (q_THX.shape[0], self._dims.num_heads, self._dims.v_head_dim)
        o_THV = torch.zeros(shape, dtype=torch.float32, device=q_THX.device)
        for prefill in plan.prefills:
            o_THV[prefill.start : prefill.stop] = self._attend_prefill(q_THX, prefill, pool_NPC)
        if plan.decode_groups:
            rows_B = torch.cat([group.rows_B for group in plan.decode_groups])
            o_BHV = attend_absorbed(
                q_THX.index_select(0, rows_B),
                pool_NPC,
                plan.decode_groups,
                self._weights,
                numerics=self._numerics,
            )
            o_THV.index_copy_(0, rows_B, o_BHV)
        return o_THV

    def _attend_prefill(self, q_THX: Tensor, prefill: PrefillPlan, pool_NPC: Tensor) -> Tensor:
        """The expanded form, reading the paged cache a key tile at a time."""
        rows_NC = pool_NPC.view(-1, pool_NPC.shape[2])

        def read_cache(first: int, num: int) -> Tensor:
            rows_K = prefill.cache_rows_L[first : first + num]
            if rows_K.shape[0] < num:
                # Past the end the last token stands in: finite rows that the mask hides.
                rows_K = torch.cat([rows_K, rows_K[-1:].expand(num - rows_K.shape[0])])
            return rows_NC.index_select(0, rows_K)

        return attend_expanded(
            q_THX[prefill.start : prefill.stop],
            read_cache,
            self._weights,
            position=prefill.position,
            numerics=self._numerics,
        )
