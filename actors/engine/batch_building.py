"""Turns the chunks of a lane into the tensors that the decoder reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from actors.engine.request import EngineRequest, RequestKey
from actors.engine.scheduler import Chunk
from configs.errors import InvariantError
from model.batch import Segment, StepBatch


def build_batch(
    chunks: Sequence[Chunk],
    requests: Mapping[RequestKey, EngineRequest],
    *,
    device: torch.device,
) -> StepBatch:
    """Return the batch of one lane; rows of logits lie in the order of the chunks.

    Args:
        chunks: At least one; each of another request.
        requests: Running requests, which own their memory.
        device: The model's.

    Raises:
        InvariantError: A chunk does not start where its request's memory ends.
    """
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    for chunk in chunks:
        request = requests[chunk.key]
        if request.slot is None or request.computed != chunk.position:
            raise InvariantError(
                f"chunk of {chunk.key} starts at {chunk.position}, its memory ends at "
                f"{request.computed}, state slot {request.slot}"
            )
        start = len(token_ids)
        token_ids.extend(request.tokens(chunk.position, chunk.num_tokens))
        segments.append(
            Segment(
                start=start,
                num_tokens=chunk.num_tokens,
                position=chunk.position,
                is_decode=chunk.is_decode,
                state_slot=request.slot,
                block_table=request.blocks,
            )
        )
        logit_rows.extend(range(len(token_ids) - chunk.num_logit_rows, len(token_ids)))
    return StepBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        segments=tuple(segments),
        logit_rows_R=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )
