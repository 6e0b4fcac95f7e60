"""From logits of a lane to one token per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.engine.choosing import Grammars, TokenChoice
from actors.engine.request import EngineRequest
from actors.request_channel import TokenLogprobs
from configs.errors import InvariantError, ServingError
from model.constraint import refusal_of
from model.logit_shaping import shape_logits
from model.logprobs import row_logprobs
from model.sampler import SamplingRow, host_logits, sample_rows


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was drawn."""

    token_id: int
    logprobs: TokenLogprobs | None
    """When the request asks for them."""


def sample_requests(
    logits_BV: Tensor, requests: Sequence[EngineRequest], grammars: Grammars | None
) -> list[Sampled | ServingError]:
    """Return the next token of each request; row b of the logits belongs to request b.

    The logits are changed where their memory is the processor's.

    A row that cannot be sampled (no finite maximum, a grammar that failed) gives an error for its
    own request only.
    """
    raw = host_logits(logits_BV)
    changed = [b for b, request in enumerate(requests) if not request.choice.is_plain]
    # Of the rows that change, those whose log-probabilities are wanted: they are the model's own.
    kept = {b: raw[b].copy() for b in changed if requests[b].choice.num_logprobs is not None}
    failures = _shape_rows(raw, {b: requests[b] for b in changed}, grammars)
    rows = [request.choice.row(request.num_known) for request in requests]
    tokens: list[int | ServingError]
    try:
        tokens = list(sample_rows(raw, rows))
    except ServingError:
        tokens = [_sample_alone(raw[b : b + 1], row) for b, row in enumerate(rows)]
    return [
        failures[b] if b in failures else _sampled(kept.get(b, raw[b]), token, request.choice)
        for b, (token, request) in enumerate(zip(tokens, requests, strict=True))
    ]


def prompt_logprobs(
    logits_RV: Tensor, next_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Return the log-probabilities of prompt tokens; row r gives those of `next_ids[r]`.

    Args:
        logits_RV: At least `len(next_ids)` rows; further ones are left out.
        next_ids: The tokens that follow the rows' own.
        num_top: Most likely ones per row.
    """
    logits = host_logits(logits_RV[: len(next_ids)])
    return [_logprobs(logits[row], token, num_top) for row, token in enumerate(next_ids)]


def _shape_rows(
    logits: NDArray[np.float32], changed: Mapping[int, EngineRequest], grammars: Grammars | None
) -> dict[int, ServingError]:
    """Change rows to what tokens are drawn from; returns the errors of those that failed."""
    allowed = _masks([request.choice for request in changed.values()], grammars)
    failures: dict[int, ServingError] = {}
    for b, request in changed.items():
        choice = request.choice
        allowed_V = allowed.get(id(choice))
        if allowed_V is not None and not allowed_V.any():
            failures[b] = _grammar_failure(request)
            continue
        shape_logits(
            logits[b], choice.shape, choice.counts, ruled_out=choice.ruled_out, allowed_V=allowed_V
        )
    return failures


def _masks(
    choices: Sequence[TokenChoice], grammars: Grammars | None
) -> dict[int, NDArray[np.bool_]]:
    """Return the masks of those with a grammar, by `id`."""
    constrained = [choice for choice in choices if choice.matcher is not None]
    if not constrained or grammars is None:
        return {}
    masks = grammars.masks([c.matcher for c in constrained if c.matcher is not None])
    return {id(choice): masks[index] for index, choice in enumerate(constrained)}


def _grammar_failure(request: EngineRequest) -> ServingError:
    matcher = request.choice.matcher
    where = f"request {request.key.request_id}, after {len(request.generated)} tokens"
    if matcher is None or not matcher.error:
        return InvariantError(f"{where}: its grammar allows no token")
    return refusal_of(f"{where}: its grammar", matcher.error)


def _sample_alone(logits_1V: NDArray[np.float32], row: SamplingRow) -> int | ServingError:
    try:
        return sample_rows(logits_1V, [row])[0]
    except ServingError as exc:
        return exc


def _sampled(
    raw_V: NDArray[np.float32], token: int | ServingError, choice: TokenChoice
) -> Sampled | ServingError:
    if isinstance(token, ServingError):
        return token
    num_top = choice.num_logprobs
    return Sampled(token, None if num_top is None else _logprobs(raw_V, token, num_top))


def _logprobs(logits_V: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    found = row_logprobs(logits_V, token_id, num_top)
    return TokenLogprobs(found.logprob, found.top_ids, found.top_logprobs)
