"""A copy of everything that a request has in the memory of its worker, at one position.

It is complete in itself: with it another worker, or the same one later, goes on as if nothing had
happened. (A prefix snapshot of `actors/engine/prefix_index.py` is not: its blocks stay in the
pool.)

Shapes: A KDA layers, M MLA layers, T tokens, C cache width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.cache import SlotCopy


@dataclass(frozen=True, slots=True, eq=False)
class RequestSnapshot:
    """Immutable. Tensors are on the processor's side and contiguous."""

    model: str
    """Fingerprint of the checkpoint and of how it computes; another model refuses it."""
    num_prompt: int
    """The first so many tokens were computed in prefill form, the others in decode form."""
    token_ids_T: NDArray[np.int32]
    """The tokens that are in it; its position is their number, at least 1."""
    slot: SlotCopy
    tokens_MTC: Tensor
    """MLA cache of each token, compute dtype."""

    @property
    def position(self) -> int:
        """Tokens that are in it."""
        return len(self.token_ids_T)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.slot.num_bytes + self.tokens_MTC.nbytes + self.token_ids_T.nbytes
