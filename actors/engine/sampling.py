"""From logits of a lane to one token per request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.engine.request import EngineRequest
from configs.errors import ServingError
from model.sampler import SamplingRow, sample_tokens


def sample_requests(
    logits_BV: Tensor, requests: Sequence[EngineRequest]
) -> list[int | ServingError]:
    """Return the next token of each request; row b of the logits belongs to request b.

    A row that cannot be sampled (no finite maximum) gives an error for its own request only.
    """
    rows = [_row_of(request) for request in requests]
    try:
        return list(sample_tokens(logits_BV, rows))
    except ServingError:
        return [_sample_alone(logits_BV[b : b + 1], row) for b, row in enumerate(rows)]


def _sample_alone(logits_1V: Tensor, row: SamplingRow) -> int | ServingError:
    try:
        return sample_tokens(logits_1V, [row])[0]
    except ServingError as exc:
        return exc


def _row_of(request: EngineRequest) -> SamplingRow:
    sampling = request.submit.sampling
    return SamplingRow(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=None if sampling.top_k == 0 else sampling.top_k,
        seed=sampling.seed,
        position=request.num_known,
    )
