"""Kimi Delta Attention: a short convolution, then a gated delta rule with one decay per key channel.

Two forms of the same recurrence: token by token (decode, and the twin of everything here) and in
tiles of `CHUNK_TOKENS` tokens (prefill). Both are float32 and functional: they return the new state
and leave the old one alone, so a trainer can differentiate them. `KdaLayer` joins them with
projections and memory.

Shapes: T tokens, B sequences, H heads, D head width (keys and values), C channels (3 H D),
J taps - 1, N tiles, X tokens of a tile.
Source: K3 report section 2.1.1, equations 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.errors import ModelConfigError
from configs.numerics import Numerics
from model.dims import KdaDims
from model.linear import linear
from model.norm import l2_normalize, rms_norm
from model.ops.pointwise import apply_pointwise

CHUNK_TOKENS = 16
"""Tokens of a tile. With a log decay above -5 a tile's sum stays above -80, and `exp(80)` times a
head width still fits float32: plain products of scaled keys cannot overflow."""
MIN_TILE_LOG_DECAY = -80.0


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """What the recurrence reads of each token, float32. Row t of every field is token t."""

    q: Tensor
    """`[T, H, D]`, normalised and scaled by `D ** -0.5`."""
    k: Tensor
    """`[T, H, D]`, normalised."""
    v: Tensor
    """`[T, H, D]`."""
    log_decay: Tensor
    """`[T, H, D]`, at most 0."""
    beta: Tensor
    """`[T, H]`, in (0, 1)."""

    def rows(self, start: int, stop: int) -> DeltaInputs:
        """The tokens `start` to `stop`, as views."""
        return DeltaInputs(
            self.q[start:stop],
            self.k[start:stop],
            self.v[start:stop],
            self.log_decay[start:stop],
            self.beta[start:stop],
        )


def compute_log_decay(z: Tensor, rate_H: Tensor, *, lower_bound: float, numerics: Numerics) -> Tensor:
    """Return the bounded gate `lower_bound * sigmoid(rate * z)` for float32 `z` `[T, H, D]`."""
    return lower_bound * apply_pointwise(torch.sigmoid, rate_H[:, None] * z, numerics=numerics)


def convolve_sequence(x_TC: Tensor, history_JC: Tensor, taps_CJ1: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution of consecutive tokens.

    Args:
        x_TC: Projections before the convolution.
        history_JC: The J inputs before them, oldest first, in the dtype of `x_TC`.
        taps_CJ1: float32; the last tap meets the current token.

    Returns:
        The float32 result before its activation `[T, C]`, and the new history.
    """
    num_tokens, num_history = x_TC.shape[0], history_JC.shape[0]
    extended = torch.cat([history_JC, x_TC])
    taps = taps_CJ1.t()
    total = extended[:num_tokens] * taps[0]
    for j in range(1, num_history + 1):
        total = total + extended[j : j + num_tokens] * taps[j]
    return total, extended[num_tokens:]


def convolve_step(x_BC: Tensor, history_BJC: Tensor, taps_CJ1: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences; otherwise as `convolve_sequence`."""
    extended = torch.cat([history_BJC, x_BC[:, None]], dim=1)
    return (extended * taps_CJ1.t()).sum(1), extended[:, 1:]


def recur_kda(inputs: DeltaInputs, state_HDD: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as written in the report, token by token: the twin.

    Args:
        inputs: Tokens of one sequence.
        state_HDD: `[H, key, value]` before the first of them.

    Returns:
        Outputs `[T, H, D]` and the state after the last token.
    """
    outputs = []
    state = state_HDD
    for t in range(inputs.q.shape[0]):
        k = inputs.k[t][..., None]
        state = state * inputs.log_decay[t].exp()[..., None]
        error = inputs.v[t] - (state * k).sum(-2)
        state = state + k * (inputs.beta[t][:, None] * error)[:, None]
        outputs.append((state * inputs.q[t][..., None]).sum(-2))
    return torch.stack(outputs), state


def step_kda(
    inputs: DeltaInputs, decay_BHD: Tensor, state_BHDD: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences, reading every state once.

    Both products with the state take the decay on their short side: `k^T diag(a) S` is
    `(a k)^T S`, and the output is `(a q)^T S + (q . k) u` with the written row `u`.

    Args:
        inputs: Row b is the token of sequence b.
        decay_BHD: `exp(inputs.log_decay)`.
        state_BHDD: Before the token.

    Returns:
        Outputs `[B, H, D]` and the new states.
    """
    q, k = inputs.q, inputs.k
    state = state_BHDD.flatten(0, 1)
    decay = decay_BHD[:, :, None]
    read = torch.bmm((torch.stack((k, q), 2) * decay).flatten(0, 1), state).view(*k.shape[:2], 2, -1)
    written = (inputs.v - read[:, :, 0]) * inputs.beta[..., None]
    output = read[:, :, 1] + written * (q * k).sum(-1, keepdim=True)
    new_state = torch.baddbmm(
        (state_BHDD * decay_BHD[..., None]).flatten(0, 1),
        k.reshape(-1, k.shape[-1], 1),
        written.reshape(-1, 1, k.shape[-1]),
    )
    return output, new_state.view_as(state_BHDD)


def chunk_kda(
    inputs: DeltaInputs, state_HDD: Tensor, *, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """The recurrence in tiles; arguments and results as `recur_kda`.

    The last tile is padded with tokens that do nothing (no decay, nothing written). Within a tile
    with decays `G_i` summed from its start, the rows written to the state solve
    `(I + A) U = beta V - (beta K e^G) S`, `A_ij = beta_i (k_i e^G_i) . (k_j e^-G_j)` for j < i.
    The system is solved for both right sides of all tiles at once; only products with the state
    are done tile after tile.
    """
    num_tokens, num_heads, width = inputs.q.shape
    q, k, v, log_decay = (
        _split_tiles(x) for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay)
    )
    beta = _split_tiles(inputs.beta[..., None])
    cumulative = log_decay.cumsum(2)
    growth = apply_pointwise(torch.exp, cumulative, numerics=numerics)
    k_late = k * apply_pointwise(torch.exp, -cumulative, numerics=numerics)
    kq_early = torch.cat([k * growth, q * growth], dim=2)
    products = torch.bmm(kq_early.flatten(0, 1), k_late.flatten(0, 1).transpose(1, 2))
    products = products.view(-1, num_heads, 2 * CHUNK_TOKENS, CHUNK_TOKENS)
    lower = (products[:, :, :CHUNK_TOKENS] * beta).tril(-1)
    reads = products[:, :, CHUNK_TOKENS:].tril()
    right = torch.cat([v, kq_early[:, :, :CHUNK_TOKENS]], dim=3) * beta
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    own, through = solved.split(width, dim=3)
    state_readers = torch.cat([through, kq_early[:, :, CHUNK_TOKENS:]], dim=2)
    total_growth = growth[:, :, -1, :, None]
    k_end = (k_late * growth[:, :, -1:]).transpose(2, 3)

    state = state_HDD
    outputs = []
    for n in range(q.shape[0]):
        read = torch.bmm(state_readers[n], state)
        written = own[n] - read[:, :CHUNK_TOKENS]
        outputs.append(torch.baddbmm(read[:, CHUNK_TOKENS:], reads[n], written))
        state = torch.baddbmm(state * total_growth[n], k_end[n], written)
    output_NHXD = torch.stack(outputs)
    return output_NHXD.transpose(1, 2).reshape(-1, num_heads, width)[:num_tokens], state


def _split_tiles(x_THD: Tensor) -> Tensor:
    """Zero-pad to whole tiles and return `[N, H, X, D]`, contiguous."""
    missing = -x_THD.shape[0] % CHUNK_TOKENS
    padded = F.pad(x_THD, (0, 0, 0, 0, 0, missing)) if missing else x_THD
    return padded.unflatten(0, (-1, CHUNK_TOKENS)).transpose(1, 2).contiguous()


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

    def forward(
        self, x_TD: Tensor, plan: StepPlan, state_SHDD: Tensor, conv_SJC: Tensor
    ) -> Tensor:
        """Return the attention of the lane's tokens and advance the states of its requests.

        Args:
            x_TD: Normed layer input; `plan.num_rows` rows.
            plan: Of this lane.
            state_SHDD: The layer's pool of states; the lane's slots are written.
            conv_SJC: The layer's pool of convolution histories; likewise.
        """
        weights, numerics = self._weights, self._numerics
        num_heads, width = self._dims.num_heads, self._dims.head_dim
        projected_TC = linear(x_TD, weights.qkv_proj, numerics=numerics)
        u_TC = apply_pointwise(F.silu, self._convolve(projected_TC, plan, conv_SJC), numerics=numerics)
        qk, v = u_TC.view(-1, 3, num_heads, width).split([2, 1], dim=1)
        qk = l2_normalize(qk)
        decay_latent = linear(x_TD, weights.decay_down_proj, numerics=numerics)
        z_TC = linear(decay_latent, weights.decay_up_proj, numerics=numerics).float()
        z_TC = z_TC + weights.decay_bias
        beta_TH = linear(x_TD, weights.beta_proj, numerics=numerics).float()
        inputs = DeltaInputs(
            q=qk[:, 0] * width**-0.5,
            k=qk[:, 1],
            v=v[:, 0],
            log_decay=compute_log_decay(
                z_TC.view(-1, num_heads, width),
                weights.decay_rate,
                lower_bound=self._dims.gate_lower_bound,
                numerics=numerics,
            ),
            beta=apply_pointwise(torch.sigmoid, beta_TH, numerics=numerics),
        )
        o_THD = self._recur(inputs, plan, state_SHDD)
        gate_TC = linear(x_TD, weights.gate_proj, numerics=numerics).float()
        gate_TC = apply_pointwise(torch.sigmoid, gate_TC, numerics=numerics)
        o_THD = rms_norm(o_THD, weights.out_norm, eps=self._norm_eps)
        o_TC = (o_THD.flatten(1) * gate_TC).to(x_TD.dtype)
        return linear(o_TC, weights.out_proj, numerics=numerics)

    def _convolve(self, x_TC: Tensor, plan: StepPlan, conv_SJC: Tensor) -> Tensor:
        """Convolve all segments and keep their histories. Padding rows come back as zeros."""
        taps = self._weights.conv
        if plan.is_one_wave and plan.num_rows == plan.num_tokens:
            slots_B = plan.decode_waves[0].slots_B
            u_BC, history = convolve_step(x_TC, conv_SJC.index_select(0, slots_B), taps)
            conv_SJC.index_copy_(0, slots_B, history)
            return u_BC
        u_TC = torch.zeros_like(x_TC, dtype=torch.float32)
        for wave in plan.decode_waves:
            history = conv_SJC.index_select(0, wave.slots_B)
            u_BC, history = convolve_step(x_TC.index_select(0, wave.rows_B), history, taps)
            conv_SJC.index_copy_(0, wave.slots_B, history)
            u_TC.index_copy_(0, wave.rows_B, u_BC)
        for prefill in plan.prefills:
            history = conv_SJC[prefill.state_slot]
            u, history = convolve_sequence(x_TC[prefill.start : prefill.stop], history, taps)
            conv_SJC[prefill.state_slot].copy_(history)
            u_TC[prefill.start : prefill.stop] = u
        return u_TC

    def _recur(self, inputs: DeltaInputs, plan: StepPlan, state_SHDD: Tensor) -> Tensor:
        """Run every segment's recurrence on its state. Padding rows come back as zeros."""
        decay = inputs.log_decay
        if plan.decode_waves:
            decay = apply_pointwise(torch.exp, decay, numerics=self._numerics)
        if plan.is_one_wave and plan.num_rows == plan.num_tokens:
            slots_B = plan.decode_waves[0].slots_B
            o_BHD, state = step_kda(inputs, decay, state_SHDD.index_select(0, slots_B))
            state_SHDD.index_copy_(0, slots_B, state)
            return o_BHD
        o_THD = torch.zeros_like(inputs.v)
        for wave in plan.decode_waves:
            state = state_SHDD.index_select(0, wave.slots_B)
            rows_B = wave.rows_B
            o_BHD, state = step_kda(inputs.select(rows_B), decay.index_select(0, rows_B), state)
            state_SHDD.index_copy_(0, wave.slots_B, state)
            o_THD.index_copy_(0, rows_B, o_BHD)
        for prefill in plan.prefills:
            chunk = inputs.rows(prefill.start, prefill.stop)
            slot = prefill.state_slot
            o, state = chunk_kda(chunk, state_SHDD[slot], numerics=self._numerics)
            state_SHDD[slot].copy_(state)
            o_THD[prefill.start : prefill.stop] = o
        return o_THD
