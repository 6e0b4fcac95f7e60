"""The seam between the attention side and the expert side.

The decoder calls `begin` with latents and routing choices, does its own work (shared experts), is
suspended, and calls `finish` for the weighted sum. Who computes the experts, and where, is the
dispatcher's business: `ReferenceDispatcher` does it in place and slowly, the router's dispatcher
sends frames to expert workers.

Shapes: T tokens, L latent size, K picks per token.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Ticket(Protocol):
    """One dispatch in flight. Made by `begin`, used up by `finish`."""

    @property
    def layer(self) -> int:
        """Layer whose experts were called."""

    def is_ready(self) -> bool:
        """Whether `finish` would return without waiting. May poll; never blocks."""


class Dispatcher(Protocol):
    """Sends latents to routed experts and brings back their weighted sum."""

    def begin(self, layer: int, z_TL: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Ticket:
        """Start the routed experts of `layer`. Returns at once; the arguments may be reused after.

        Args:
            layer: 0-based layer index; a MoE layer.
            z_TL: Latents, compute dtype, contiguous.
            expert_ids_TK: Logical expert ids, int64, distinct in a row.
            weights_TK: Routing weights, float32.
        """

    def finish(self, ticket: Ticket) -> Tensor:
        """Wait for the answers of `ticket` and return `u_TL`.

        Returns:
            Weighted sum over the K picks, float32, `[T, L]`, owned by the caller. Under invariant
            numerics the terms of a row are added in ascending logical expert id.

        Raises:
            TransportTimeoutError: An answer did not come before the deadline.
            WorkerError: An expert worker failed or is gone and nobody else holds the expert.
        """
