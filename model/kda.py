"""Kimi Delta Attention: a short convolution, then a gated delta rule with a decay per key channel.

Two forms of the same recurrence: token by token (decode, and the twin of everything here) and in
tiles of `CHUNK_TOKENS` tokens (prefill). Both are float32 and functional: they return the new state
and leave the old one alone, so a trainer can differentiate them. `model/kda_layer.py` joins them
with projections and memory.

Shapes: T tokens, B sequences, H heads, D head width (keys and values), C channels (3 H D),
J taps - 1, N tiles, X tokens of a tile.
Source: K3 report section 2.1.1, equations 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from configs.numerics import Numerics
from model.ops.constants import constant
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

    def select(self, rows_B: Tensor) -> DeltaInputs:
        """The tokens `rows_B`, copied."""
        return DeltaInputs(
            self.q.index_select(0, rows_B),
            self.k.index_select(0, rows_B),
            self.v.index_select(0, rows_B),
            self.log_decay.index_select(0, rows_B),
            self.beta.index_select(0, rows_B),
        )


def compute_log_decay(
    z_TC: Tensor, bias_C: Tensor, rate_C: Tensor, *, lower_bound: float, numerics: Numerics
) -> Tensor:
    """Return the bounded gate `lower_bound * sigmoid(rate * (z + bias))`, float32 `[T, C]`."""
    sigmoid = apply_pointwise(torch.sigmoid, (z_TC + bias_C) * rate_C, numerics=numerics)
    return sigmoid * constant(lower_bound, z_TC.device)


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
    inputs: DeltaInputs, decay_BHD: Tensor, state_BHDD: Tensor, *, is_in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences, reading every state once.

    Both products with the state take the decay on their short side: `k^T diag(a) S` is
    `(a k)^T S`, and the output is `(a q)^T S + (q . k) u` with the written row `u`.

    Args:
        inputs: Row b is the token of sequence b.
        decay_BHD: `exp(inputs.log_decay)`.
        state_BHDD: Before the token; contiguous.
        is_in_place: Write the new states over the old ones.

    Returns:
        Outputs `[B, H, D]` and the new states.
    """
    q, k = inputs.q, inputs.k
    kq = torch.stack((k, q), 2) * decay_BHD[:, :, None]
    read = torch.bmm(kq.flatten(0, 1), state_BHDD.flatten(0, 1)).view_as(kq)
    read_k, read_q = read.unbind(2)
    written = (inputs.v - read_k) * inputs.beta[..., None]
    output = torch.addcmul(read_q, written, (q * k).sum(-1, keepdim=True))
    decay = decay_BHD[..., None]
    new_state = state_BHDD.mul_(decay) if is_in_place else state_BHDD * decay
    width = k.shape[-1]
    new_state.view(-1, width, width).baddbmm_(
        k.reshape(-1, width, 1), written.reshape(-1, 1, width)
    )
    return output, new_state


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
    q, k, v, log_decay = (_split_tiles(x) for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
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
    own, through = torch.split_with_sizes(solved, (width, width), dim=3)
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
    padded = functional.pad(x_THD, (0, 0, 0, 0, 0, missing)) if missing else x_THD
    tiles = padded.view(-1, CHUNK_TOKENS, *padded.shape[1:])
    return tiles.transpose(1, 2).contiguous()
