"""The dispatcher's twin: computes every (token, expert) pair in place, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from configs.errors import InvariantError
from model.dispatcher import Ticket


class ExpertFunction(Protocol):
    """Computes one routed expert."""

    def __call__(self, layer: int, expert_id: int, z_NL: Tensor) -> Tensor:
        """Return `E(z)`, `[N, L]`, of an expert of a 0-based layer."""


@dataclass(frozen=True, slots=True)
class ReferenceTicket:
    """A dispatch whose answer is already there."""

    layer: int
    u_TL: Tensor

    def is_ready(self) -> bool:
        """Always."""
        return True


class ReferenceDispatcher:
    """Computes the experts in place: each token alone, its experts in ascending id.

    The slow obvious twin of the router's dispatcher; same protocol.
    """

    def __init__(self, compute_expert: ExpertFunction) -> None:
        self._compute_expert = compute_expert

    def begin(
        self, layer: int, z_TL: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> ReferenceTicket:
        """Compute the weighted sums at once; `finish` only hands them over."""
        u_TL = torch.zeros(z_TL.shape, dtype=torch.float32, device=z_TL.device)
        for t in range(z_TL.shape[0]):
            picks = sorted(zip(expert_ids_TK[t].tolist(), weights_TK[t].tolist(), strict=True))
            for expert_id, weight in picks:
                y_1L = self._compute_expert(layer, expert_id, z_TL[t : t + 1])
                u_TL[t] += weight * y_1L[0].float()
        return ReferenceTicket(layer=layer, u_TL=u_TL)

    def finish(self, ticket: Ticket) -> Tensor:
        """Return the sums of `ticket`.

        Raises:
            InvariantError: The ticket is another dispatcher's.
        """
        if not isinstance(ticket, ReferenceTicket):
            raise InvariantError(
                f"ticket of layer {ticket.layer} is a {type(ticket).__name__}, "
                "not made by this dispatcher"
            )
        return ticket.u_TL
