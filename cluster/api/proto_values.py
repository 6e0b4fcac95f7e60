"""Between the messages of latentmesh.v1 and our own values, both ways. Checks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
from google.protobuf.duration_pb2 import Duration

from actors.request_channel import Usage
from cluster.api.answers import Chunk, Finished, ScoreRows
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.validation import GenerateParams, ScoreParams
from configs.errors import InvariantError
from configs.ids import RequestId
from configs.numerics import FinishReason

_TO_REASON = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FROM_REASON = {number: reason for reason, number in _TO_REASON.items()}


def read_generate(request: pb.GenerateRequest) -> GenerateParams:
    """Return what a request asks for; unset fields are None. Token ids stay in the message."""
    sampling = request.sampling
    return GenerateParams(
        model=request.model,
        prompt=_prompt_of(request),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        resume_offset=request.resume_offset,
    )


def write_generate(params: GenerateParams) -> pb.GenerateRequest:
    """Return the request that asks for `params`; the inverse of `read_generate`."""
    request = pb.GenerateRequest(
        model=params.model,
        max_tokens=params.max_tokens,
        sampling=pb.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
        ),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        resume_offset=params.resume_offset,
    )
    _set_prompt(request, params.prompt)
    return request


def read_score(request: pb.ScoreRequest) -> ScoreParams:
    """Return what a request asks for. Token ids stay in the message."""
    return ScoreParams(model=request.model, prompt=_prompt_of(request))


def write_score(params: ScoreParams) -> pb.ScoreRequest:
    """Return the request that asks for `params`."""
    request = pb.ScoreRequest(model=params.model)
    _set_prompt(request, params.prompt)
    return request


def write_event(event: Chunk | Finished) -> pb.GenerateResponse:
    """Return the message of one event of a generation."""
    if isinstance(event, Chunk):
        return pb.GenerateResponse(chunk=pb.Chunk(token_ids=event.token_ids, text=event.text))
    return pb.GenerateResponse(
        finished=pb.Finished(
            finish_reason=_TO_REASON[event.finish_reason],
            usage=pb.Usage(
                prompt_tokens=event.usage.prompt_tokens,
                computed_tokens=event.usage.computed_tokens,
                output_tokens=event.usage.output_tokens,
                queue_time=_duration(event.usage.queue_s),
                time_to_first_token=_duration(event.usage.first_token_s),
                total_time=_duration(event.usage.total_s),
            ),
            seed=event.seed,
            request_id=event.request_id,
        )
    )


def read_event(response: pb.GenerateResponse) -> Chunk | Finished:
    """Return the event of a message.

    Raises:
        InvariantError: The message holds none that this version knows.
    """
    if response.WhichOneof("event") == "chunk":
        return Chunk(token_ids=tuple(response.chunk.token_ids), text=response.chunk.text)
    if response.WhichOneof("event") != "finished":
        raise InvariantError("the server sent an event that this client does not know; update it")
    finished = response.finished
    if finished.finish_reason not in _FROM_REASON:
        raise InvariantError(
            f"the server sent finish reason {finished.finish_reason}, which this client does not "
            "know; update it"
        )
    usage = finished.usage
    return Finished(
        finish_reason=_FROM_REASON[finished.finish_reason],
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            computed_tokens=usage.computed_tokens,
            output_tokens=usage.output_tokens,
            queue_s=_seconds(usage.queue_time),
            first_token_s=_seconds(usage.time_to_first_token),
            total_s=_seconds(usage.total_time),
        ),
        seed=finished.seed,
        request_id=RequestId(finished.request_id),
    )


def write_rows(rows: ScoreRows) -> pb.ScoreResponse:
    """Return the message of some rows."""
    num_rows, vocab_size = rows.logits.shape
    return pb.ScoreResponse(
        first_position=rows.first_position,
        num_rows=num_rows,
        vocab_size=vocab_size,
        logits=rows.logits.tobytes(),
    )


def read_rows(response: pb.ScoreResponse) -> ScoreRows:
    """Return the rows of a message.

    Raises:
        InvariantError: Counts and bytes disagree.
    """
    values = np.frombuffer(response.logits, dtype="<f4")
    if values.size != response.num_rows * response.vocab_size:
        raise InvariantError(
            f"the server sent {values.size} logits for {response.num_rows} rows of "
            f"{response.vocab_size}"
        )
    shape = (response.num_rows, response.vocab_size)
    return ScoreRows(response.first_position, values.reshape(shape))


def _prompt_of(request: pb.GenerateRequest | pb.ScoreRequest) -> str | Sequence[int] | None:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            # Not copied: a list that is refused for its length alone may hold millions.
            return request.token_ids.ids
        case _:
            return None


def _set_prompt(
    request: pb.GenerateRequest | pb.ScoreRequest, prompt: str | Sequence[int] | None
) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt is not None:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration


def _seconds(duration: Duration) -> float:
    return duration.ToTimedelta().total_seconds()
