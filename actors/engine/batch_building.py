"""Turns the chunks of a lane into the tensors that the decoder reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from actors.engine.request import EngineRequest, RequestKey
from actors.engine.scheduler import Chunk
from configs.errors import InvariantError
from model.batch import Segment, StepBatch


def build_batch(
    chunks: Sequence[Chunk],
    requests: Mapping[RequestKey, EngineRequest],
    *,
    scratch: Sequence[int],
    device: torch.device,
) -> StepBatch:
    """Return the batch of one lane; rows of logits lie in the order of the chunks.

    A chunk that leaves a snapshot before its end becomes two segments; the state between them is
    copied to the next scratch slot, in the order of such chunks.

    Args:
        chunks: At least one; each of another request.
        requests: Running requests, which own their memory.
        scratch: State slots for snapshots, as many as there are such chunks at least.
        device: The model's.

    Raises:
        InvariantError: A chunk does not start where its request's memory ends.
    """
    token_ids: list[int] = []
    segments: list[Segment] = []
    logit_rows: list[int] = []
    free_scratch = iter(scratch)
    for chunk in chunks:
        request = requests[chunk.key]
        if request.computed != chunk.position:
            raise InvariantError(
                f"chunk of {chunk.key} starts at {chunk.position}, its memory ends at "
                f"{request.computed}"
            )
        start = len(token_ids)
        token_ids.extend(request.tokens(chunk.position, chunk.num_tokens))
        segments.extend(_segments(chunk, request, start, free_scratch))
        logit_rows.extend(range(len(token_ids) - chunk.num_logit_rows, len(token_ids)))
    return StepBatch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        segments=tuple(segments),
        logit_rows_R=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )


def _segments(
    chunk: Chunk, request: EngineRequest, start: int, scratch: Iterator[int]
) -> list[Segment]:
    cuts = [chunk.position, chunk.end]
    if chunk.save_at is not None and chunk.save_at < chunk.end:
        cuts.insert(1, chunk.save_at)
    return [
        Segment(
            start=start + position - chunk.position,
            num_tokens=end - position,
            position=position,
            is_decode=chunk.is_decode,
            state_slot=_slot_of(request),
            block_table=request.blocks,
            save_slot=next(scratch) if end != chunk.end else None,
        )
        for position, end in pairwise(cuts)
    ]


def _slot_of(request: EngineRequest) -> int:
    if request.slot is None:
        raise InvariantError(f"request {request.key} is computed without a state slot")
    return request.slot
