"""Gated multi-head latent attention without positions, over a paged cache of latents.

Two forms: expanded (prefill: keys and values of each head are made from the latents, tile by tile,
with an online softmax) and absorbed (decode: the key up-projection moves to the query and the value
up-projection behind the sum, so that the cache is read as it lies; long contexts in tiles too).
`attend_plainly` is the twin of both.

Shapes: T tokens, H heads, L cached positions, Q queries of a tile, K keys of a tile, R latent rank,
E nope width, G shared key width, C cache width (R + G), V value width, B decode tokens.
Source: K3 report section 2.1.2; released modelling code for the raw shared key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from configs.errors import InvariantError
from configs.numerics import Numerics
from model.linear import ROW_TILE, pad_rows
from model.ops.pointwise import apply_pointwise
from model.step_plan import DecodeGroup
from model.weight_tree import MlaWeights


@dataclass(frozen=True, slots=True)
class TileShape:
    """Rows of a query tile and of a key tile of the expanded form."""

    num_queries: int
    num_keys: int


INVARIANT_TILE = TileShape(num_queries=64, num_keys=128)
"""Tiles lie at multiples of these absolute positions, whole even where a chunk covers a part."""
FAST_TILE = TileShape(num_queries=256, num_keys=512)
DECODE_TILE_TOKENS = 2048
"""Cached positions of each request that decode copies out of the pool at once. A long context is
read tile by tile: a whole copy costs memory by the context, and twice the time on a CPU."""


def attend_plainly(
    q_THX: Tensor, cache_LC: Tensor, k_up_HER: Tensor, v_up_HVR: Tensor, *, position: int
) -> Tensor:
    """Causal attention with every key, value and score written out: the twin. Autograd-safe.

    Args:
        q_THX: Queries of consecutive tokens, `[T, H, E + G]`.
        cache_LC: Latents and shared keys of positions 0 to `position + T`.
        k_up_HER: Key up-projection.
        v_up_HVR: Value up-projection.
        position: Absolute position of the first query.

    Returns:
        float32 `[T, H, V]`.
    """
    rank = k_up_HER.shape[2]
    latent_LR, shared_LG = cache_LC[:, :rank].float(), cache_LC[:, rank:].float()
    keys_HLX = torch.cat(
        [latent_LR @ k_up_HER.float().transpose(1, 2), shared_LG.expand(len(k_up_HER), -1, -1)], 2
    )
    scores_HTL = q_THX.float().transpose(0, 1) @ keys_HLX.transpose(1, 2) * q_THX.shape[2] ** -0.5
    positions_T = position + torch.arange(q_THX.shape[0], device=q_THX.device)
    is_hidden_TL = torch.arange(cache_LC.shape[0], device=q_THX.device) > positions_T[:, None]
    weights_HTL = scores_HTL.masked_fill(is_hidden_TL, -torch.inf).softmax(-1)
    values_HLV = latent_LR @ v_up_HVR.float().transpose(1, 2)
    return torch.matmul(weights_HTL, values_HLV).transpose(0, 1)


def attend_expanded(
    q_THX: Tensor,
    read_cache: Callable[[int, int], Tensor],
    weights: MlaWeights,
    *,
    position: int,
    numerics: Numerics,
) -> Tensor:
    """Causal attention of a chunk over all positions up to its end, in bounded memory.

    Key tiles are the outer loop: each is expanded once, then met by every query tile that sees it.

    Args:
        q_THX: Queries of consecutive tokens, `[T, H, E + G]`.
        read_cache: `read_cache(first, num)` returns the cached `[num, C]` from position `first`;
            positions past the end may hold any finite rows.
        weights: Up-projections.
        position: Absolute position of the first query.
        numerics: Under invariant numerics tiles are whole and lie on the absolute grid.

    Returns:
        float32 `[T, H, V]`.
    """
    num_tokens = q_THX.shape[0]
    end = position + num_tokens
    is_invariant = numerics is Numerics.INVARIANT
    shape = INVARIANT_TILE if is_invariant else FAST_TILE
    lead = position % shape.num_queries if is_invariant else 0
    tail = -(lead + num_tokens) % shape.num_queries if is_invariant else 0
    q_HTX = functional.pad(q_THX.float(), (0, 0, 0, 0, lead, tail)).transpose(0, 1)
    first_query = position - lead
    tiles = [
        _QueryTile(q_HQX.contiguous(), first_query + i * shape.num_queries)
        for i, q_HQX in enumerate(torch.split(q_HTX, shape.num_queries, dim=1))
    ]
    for first_key in range(0, end, shape.num_keys):
        num_keys = shape.num_keys if is_invariant else min(shape.num_keys, end - first_key)
        keys_HXK, values_HKV = _expand_keys(read_cache(first_key, num_keys), weights)
        for tile in tiles:
            if first_key <= tile.last_position:
                tile.meet(keys_HXK, values_HKV, first_key, numerics=numerics)
    return torch.cat([tile.finish() for tile in tiles], dim=1).transpose(0, 1)[
        lead : lead + num_tokens
    ]


def _expand_keys(cache_KC: Tensor, weights: MlaWeights) -> tuple[Tensor, Tensor]:
    """Keys `[H, X, K]` and values `[H, K, V]` of a tile, float32, from its cached rows."""
    num_heads, _, rank = weights.k_up_proj.shape
    latent_KR = cache_KC[:, :rank].contiguous()
    k_KHE = functional.linear(latent_KR, weights.k_up_proj.flatten(0, 1)).view(
        len(cache_KC), num_heads, -1
    )
    v_KHV = functional.linear(latent_KR, weights.v_up_proj.flatten(0, 1)).view(
        len(cache_KC), num_heads, -1
    )
    shared_KHG = cache_KC[:, None, rank:].expand(-1, num_heads, -1)
    keys_HXK = torch.cat([k_KHE, shared_KHG], dim=2).permute(1, 2, 0)
    return keys_HXK.float().contiguous(), v_KHV.transpose(0, 1).float().contiguous()


class _RunningSoftmax:
    """Attention over key tiles that come one after the other. One pass over the keys.

    For a query that sees nothing of a tile, all its scores -inf, the tile changes no bit. The first
    tile of a query holds position 0, which every query sees, so the maximum is finite from then on.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._max = torch.empty(0)
        self._total = torch.empty(0)

    def take(self, scores: Tensor, values: Tensor, *, numerics: Numerics) -> None:
        """Take in a tile: scores `[., Q, K]`, which are overwritten, and values `[., K, V]`."""
        # The result does not depend on the maximum that is taken off, so no gradient flows there.
        tile_max = scores.detach().amax(-1, keepdim=True)
        if self._sum is None:
            weights = apply_pointwise(torch.exp_, scores.sub_(tile_max), numerics=numerics)
            self._max, self._total = tile_max, weights.sum(-1, keepdim=True)
            self._sum = torch.bmm(weights, values)
            return
        new_max = torch.maximum(self._max, tile_max)
        weights = apply_pointwise(torch.exp_, scores.sub_(new_max), numerics=numerics)
        decay = torch.exp(self._max - new_max)
        self._max = new_max
        self._total = self._total * decay + weights.sum(-1, keepdim=True)
        self._sum = self._sum * decay + torch.bmm(weights, values)

    def finish(self) -> Tensor:
        """The attention result `[., Q, V]`."""
        if self._sum is None:
            raise InvariantError("attention over no key tile: its queries have no cached position")
        return torch.div(self._sum, self._total)


class _QueryTile:
    """Queries of a tile and their running softmax."""

    def __init__(self, q_HQX: Tensor, position: int) -> None:
        self._q_HQX: Tensor = q_HQX * q_HQX.shape[2] ** -0.5
        self._position = position
        self._softmax = _RunningSoftmax()

    @property
    def last_position(self) -> int:
        """Position of the last query."""
        return self._position + int(self._q_HQX.shape[1]) - 1

    def meet(
        self, keys_HXK: Tensor, values_HKV: Tensor, first_key: int, *, numerics: Numerics
    ) -> None:
        """Take in a key tile."""
        scores = torch.bmm(self._q_HQX, keys_HXK)
        if first_key + keys_HXK.shape[2] - 1 > self._position:
            scores = scores + self._causal_mask(scores, first_key)
        self._softmax.take(scores, values_HKV, numerics=numerics)

    def finish(self) -> Tensor:
        """The attention result `[H, Q, V]`."""
        return self._softmax.finish()

    def _causal_mask(self, scores_HQK: Tensor, first_key: int) -> Tensor:
        """`[Q, K]`: 0 where the query sees the key, -inf where not."""
        _, num_queries, num_keys = scores_HQK.shape
        mask = scores_HQK.new_full((num_queries, num_keys), -torch.inf)
        return mask.triu(self._position - first_key + 1)


def attend_absorbed(
    q_BHX: Tensor,
    pool_NPC: Tensor,
    groups: tuple[DecodeGroup, ...],
    weights: MlaWeights,
    *,
    numerics: Numerics,
) -> Tensor:
    """Attention of decode tokens over the cache as it lies.

    Args:
        q_BHX: Queries `[B, H, E + G]` in the order of the groups' tokens.
        pool_NPC: The layer's blocks.
        groups: Which blocks each token reads.
        weights: Up-projections.
        numerics: Under invariant numerics every group is one token.

    Returns:
        float32 `[B, H, V]`.
    """
    num_nope, rank = weights.k_up_proj.shape[1:]
    q_latent = _multiply_heads(q_BHX[:, :, :num_nope], weights.k_up_proj, numerics=numerics)
    q_BHC = torch.cat([q_latent, q_BHX[:, :, num_nope:]], dim=2).float()
    contexts = []
    first = 0
    for group in groups:
        num = group.rows_B.shape[0]
        contexts.append(
            _read_group(
                q_BHC[first : first + num],
                pool_NPC,
                group,
                rank=rank,
                scale=q_BHX.shape[2] ** -0.5,
                numerics=numerics,
            )
        )
        first += num
    context_BHR = contexts[0] if len(contexts) == 1 else torch.cat(contexts)
    context_BHR = context_BHR.to(q_BHX.dtype)
    v_up_HRV = weights.v_up_proj.transpose(1, 2)
    return _multiply_heads(context_BHR, v_up_HRV, numerics=numerics).float()


def _read_group(
    q_BHC: Tensor,
    pool_NPC: Tensor,
    group: DecodeGroup,
    *,
    rank: int,
    scale: float,
    numerics: Numerics,
) -> Tensor:
    """Attention of a group in latent space, `[B, H, R]`; copies at most a tile of its cache."""
    num_queries, block_size, width = q_BHC.shape[0], *pool_NPC.shape[1:]
    blocks_BN = group.cache_blocks_N.view(num_queries, -1)
    blocks_per_tile = max(1, DECODE_TILE_TOKENS // block_size)
    softmax = _RunningSoftmax()
    # One buffer for all tiles: fresh pages for each cost more than its reading.
    num_rows = num_queries * min(blocks_per_tile, blocks_BN.shape[1])
    buffer_NPC = pool_NPC.new_empty(num_rows, block_size, width)
    for first_block in range(0, blocks_BN.shape[1], blocks_per_tile):
        blocks = blocks_BN[:, first_block : first_block + blocks_per_tile]
        first_key = first_block * block_size
        last_key = min(first_key + blocks.shape[1] * block_size, group.span)
        cache = buffer_NPC[: blocks.numel()]
        torch.index_select(pool_NPC, 0, blocks.flatten(), out=cache)
        cache_BKC = cache.view(num_queries, -1, width)[:, : last_key - first_key].float()
        scores_BHK = torch.baddbmm(
            group.mask_B1L[:, :, first_key:last_key], q_BHC, cache_BKC.transpose(1, 2), alpha=scale
        )
        if blocks.shape[1] == blocks_BN.shape[1]:
            return torch.bmm(scores_BHK.softmax(-1), cache_BKC[:, :, :rank])
        softmax.take(scores_BHK, cache_BKC[:, :, :rank], numerics=numerics)
    return softmax.finish()


def _multiply_heads(x_BHI: Tensor, weight_HIO: Tensor, *, numerics: Numerics) -> Tensor:
    """Per-head product `[B, H, O]`, on row tiles of fixed size where bits matter."""
    if numerics is Numerics.FAST:
        return torch.bmm(x_BHI.transpose(0, 1), weight_HIO).transpose(0, 1)
    tiles = [
        torch.bmm(tile.transpose(0, 1).contiguous(), weight_HIO).transpose(0, 1)
        for tile in torch.split(pad_rows(x_BHI), ROW_TILE)
    ]
    return torch.cat(tiles)[: x_BHI.shape[0]]
