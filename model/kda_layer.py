"""One KDA attention layer over the requests of a lane: projections, memory, and the recurrence.

Shapes: T rows of the lane, D hidden size, C channels (3 x heads x head width), H heads, S slots,
J taps - 1, B decode tokens of a wave.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from configs.errors import ModelConfigError
from configs.numerics import Numerics
from model.dims import KdaDims
from model.kda import (
    CHUNK_TOKENS,
    MIN_TILE_LOG_DECAY,
    DeltaInputs,
    chunk_kda,
    compute_log_decay,
    convolve_sequence,
    convolve_step,
    step_kda,
)
from model.linear import JoinedLinear, linear
from model.norm import l2_normalize, rms_norm
from model.ops.pointwise import apply_pointwise
from model.step_plan import DecodeWave, StepPlan
from model.weight_tree import KdaWeights


class KdaLayer:
    """The KDA attention of one decoder layer: projections, convolution, recurrence, gated norm."""

    def __init__(
        self, weights: KdaWeights, dims: KdaDims, *, norm_eps: float, numerics: Numerics
    ) -> None:
        lowest = CHUNK_TOKENS * dims.gate_lower_bound
        if lowest < MIN_TILE_LOG_DECAY:
            raise ModelConfigError(
                f"linear_attn_config.gate_lower_bound is {dims.gate_lower_bound}: a tile of "
                f"{CHUNK_TOKENS} tokens can decay by exp({lowest}), the limit is "
                f"exp({MIN_TILE_LOG_DECAY}); use a bound of at least "
                f"{MIN_TILE_LOG_DECAY / CHUNK_TOKENS}"
            )
        self._weights = weights
        self._dims = dims
        self._norm_eps = norm_eps
        self._numerics = numerics
        self._in_proj = JoinedLinear(
            (weights.qkv_proj, weights.gate_proj, weights.decay_down_proj, weights.beta_proj),
            numerics=numerics,
        )
        self._decay_rate_C = weights.decay_rate.repeat_interleave(dims.head_dim)
        # q is scaled, k is not.
        self._qk_scale = weights.decay_rate.new_tensor([dims.head_dim**-0.5, 1.0]).view(2, 1, 1)

    def forward(self, x_TD: Tensor, plan: StepPlan, state_SHDD: Tensor, conv_SJC: Tensor) -> Tensor:
        """Return the attention of the lane's tokens and advance the states of its requests.

        Args:
            x_TD: Normed layer input; `plan.num_rows` rows.
            plan: Of this lane.
            state_SHDD: The layer's pool of states; the lane's slots are written.
            conv_SJC: The layer's pool of convolution histories; likewise.
        """
        weights, numerics = self._weights, self._numerics
        shape = (-1, self._dims.num_heads, self._dims.head_dim)
        qkv_TC, gate_TC, decay_latent, beta_TH = self._in_proj(x_TD)
        u_TC = self._convolve(qkv_TC, plan, conv_SJC)
        u = apply_pointwise(functional.silu, u_TC, numerics=numerics).view(-1, 3, *shape[1:])
        q, k = l2_normalize(u[:, :2], scale=self._qk_scale).unbind(1)
        log_decay_TC = compute_log_decay(
            linear(decay_latent, weights.decay_up_proj, numerics=numerics).float(),
            weights.decay_bias,
            self._decay_rate_C,
            lower_bound=self._dims.gate_lower_bound,
            numerics=numerics,
        )
        inputs = DeltaInputs(
            q=q,
            k=k,
            v=u[:, 2],
            log_decay=log_decay_TC.view(shape),
            beta=apply_pointwise(torch.sigmoid, beta_TH.float(), numerics=numerics),
        )
        o_THD = self._recur(inputs, plan, state_SHDD)
        gate_TC = apply_pointwise(torch.sigmoid, gate_TC.float(), numerics=numerics)
        o_THD = rms_norm(o_THD, weights.out_norm, eps=self._norm_eps)
        o_TC = (o_THD.flatten(1) * gate_TC).to(x_TD.dtype)
        return linear(o_TC, weights.out_proj, numerics=numerics)

    def _convolve(self, x_TC: Tensor, plan: StepPlan, conv_SJC: Tensor) -> Tensor:
        """Convolve all segments and keep their histories. Padding rows come back as zeros."""
        taps = self._weights.conv
        if plan.is_single_wave:
            return self._convolve_wave(x_TC, plan.decode_waves[0], conv_SJC)
        u_TC = torch.zeros_like(x_TC, dtype=torch.float32)
        for wave in plan.decode_waves:
            u_BC = self._convolve_wave(x_TC.index_select(0, wave.rows_B), wave, conv_SJC)
            u_TC.index_copy_(0, wave.rows_B, u_BC)
        for prefill in plan.prefills:
            history = conv_SJC[prefill.state_slot]
            u, history = convolve_sequence(x_TC[prefill.start : prefill.stop], history, taps)
            conv_SJC[prefill.state_slot].copy_(history)
            if prefill.save_slot is not None:
                conv_SJC[prefill.save_slot].copy_(history)
            u_TC[prefill.start : prefill.stop] = u
        return u_TC

    def _convolve_wave(self, x_BC: Tensor, wave: DecodeWave, conv_SJC: Tensor) -> Tensor:
        """One token of each request of a wave."""
        if wave.slot_range is not None:
            history_BJC = conv_SJC[wave.slot_range]
            u_BC, new_history = convolve_step(x_BC, history_BJC, self._weights.conv)
            history_BJC.copy_(new_history)
            return u_BC
        history_BJC = conv_SJC.index_select(0, wave.slots_B)
        u_BC, new_history = convolve_step(x_BC, history_BJC, self._weights.conv)
        conv_SJC.index_copy_(0, wave.slots_B, new_history)
        return u_BC

    def _recur(self, inputs: DeltaInputs, plan: StepPlan, state_SHDD: Tensor) -> Tensor:
        """Run every segment's recurrence on its state. Padding rows come back as zeros."""
        decay = inputs.log_decay
        if plan.decode_waves:
            decay = apply_pointwise(torch.exp, decay, numerics=self._numerics)
        if plan.is_single_wave:
            return _step_wave(inputs, decay, plan.decode_waves[0], state_SHDD)
        o_THD = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
        for wave in plan.decode_waves:
            rows_B = wave.rows_B
            chosen = inputs.select(rows_B)
            o_BHD = _step_wave(chosen, decay.index_select(0, rows_B), wave, state_SHDD)
            o_THD.index_copy_(0, rows_B, o_BHD)
        for prefill in plan.prefills:
            chunk = inputs.rows(prefill.start, prefill.stop)
            slot = prefill.state_slot
            o, state = chunk_kda(chunk, state_SHDD[slot], numerics=self._numerics)
            state_SHDD[slot].copy_(state)
            if prefill.save_slot is not None:
                state_SHDD[prefill.save_slot].copy_(state)
            o_THD[prefill.start : prefill.stop] = o
        return o_THD


def _step_wave(
    inputs: DeltaInputs, decay_BHD: Tensor, wave: DecodeWave, state_SHDD: Tensor
) -> Tensor:
    """One token of each request of a wave; states that lie side by side are changed in place."""
    if wave.slot_range is not None:
        state_BHDD = state_SHDD[wave.slot_range]
        return step_kda(inputs, decay_BHD, state_BHDD, is_in_place=True)[0]
    state_BHDD = state_SHDD.index_select(0, wave.slots_B)
    o_BHD, state_BHDD = step_kda(inputs, decay_BHD, state_BHDD, is_in_place=True)
    state_SHDD.index_copy_(0, wave.slots_B, state_BHDD)
    return o_BHD
