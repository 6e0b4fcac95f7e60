"""Between the messages of latentmesh.v1 and our own values, both ways. Checks nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration

from actors.request_channel import TokenLogprobs, Usage
from cluster.api.answers import Chunk, Finished, ScoreRows
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.params import GenerateParams, SamplingParams, ScoreParams, StopParams
from configs.errors import InvariantError
from configs.ids import RequestId
from configs.numerics import FinishReason
from model.constraint import Constraint, ConstraintKind

_TO_REASON = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FROM_REASON = {number: reason for reason, number in _TO_REASON.items()}


def read_generate(request: pb.GenerateRequest) -> GenerateParams:
    """Return what a request asks for; unset fields are None. Token ids stay in the message."""
    return GenerateParams(
        model=request.model,
        prompt=_prompt_of(request),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        sampling=_read_sampling(request.sampling),
        stop=StopParams(
            texts=tuple(request.stop),
            token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            min_tokens=request.min_tokens,
            include_text=request.include_stop_text,
        ),
        num_choices=max(request.num_choices, 1),
        constraint=_read_constraint(request.constraint),
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        resume_offset=request.resume_offset,
        priority=request.priority,
    )


def write_generate(params: GenerateParams) -> pb.GenerateRequest:
    """Return the request that asks for `params`; the inverse of `read_generate`."""
    sampling = params.sampling
    request = pb.GenerateRequest(
        model=params.model,
        max_tokens=params.max_tokens,
        sampling=pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
        ),
        stop=params.stop.texts,
        stop_token_ids=params.stop.token_ids,
        ignore_eos=params.stop.ignore_eos,
        min_tokens=params.stop.min_tokens,
        include_stop_text=params.stop.include_text,
        num_choices=params.num_choices,
        constraint=_write_constraint(params.constraint),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        resume_offset=params.resume_offset,
        priority=params.priority,
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
        chunk = pb.Chunk(token_ids=event.token_ids, text=event.text, choice=event.choice)
        chunk.logprobs.extend(map(_write_logprobs, event.logprobs))
        chunk.prompt_logprobs.extend(map(_write_logprobs, event.prompt_logprobs))
        chunk.prompt_position = event.prompt_position
        return pb.GenerateResponse(chunk=chunk)
    matched = event.matched_stop
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
            choice=event.choice,
            stop_token_id=matched if isinstance(matched, int) else None,
            stop_text=matched if isinstance(matched, str) else None,
        )
    )


def read_event(response: pb.GenerateResponse) -> Chunk | Finished:
    """Return the event of a message.

    Raises:
        InvariantError: The message holds none that this version knows.
    """
    if response.WhichOneof("event") == "chunk":
        chunk = response.chunk
        return Chunk(
            token_ids=tuple(chunk.token_ids),
            text=chunk.text,
            choice=chunk.choice,
            logprobs=tuple(map(_read_logprobs, chunk.logprobs)),
            prompt_logprobs=tuple(map(_read_logprobs, chunk.prompt_logprobs)),
            prompt_position=chunk.prompt_position,
        )
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
        choice=finished.choice,
        matched_stop=_read_matched_stop(finished),
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


def _read_sampling(sampling: pb.SamplingParams) -> SamplingParams:
    def value_of(field: str) -> Any:  # noqa: ANN401 - a number; None when unset
        return getattr(sampling, field) if sampling.HasField(field) else None

    return SamplingParams(
        temperature=value_of("temperature"),
        top_p=value_of("top_p"),
        top_k=value_of("top_k"),
        min_p=value_of("min_p"),
        repetition_penalty=value_of("repetition_penalty"),
        presence_penalty=value_of("presence_penalty"),
        frequency_penalty=value_of("frequency_penalty"),
        # Not copied before its size is checked.
        logit_bias=sampling.logit_bias,
        seed=value_of("seed"),
    )


def _read_constraint(constraint: pb.Constraint) -> Constraint | None:
    kind = constraint.WhichOneof("kind")
    match kind:
        case "json_schema" | "regex" | "grammar":
            return Constraint(ConstraintKind(kind), getattr(constraint, kind))
        case "json_object":
            return Constraint(ConstraintKind.JSON_OBJECT) if constraint.json_object else None
        case "choices":
            return Constraint(ConstraintKind.CHOICE, json.dumps(list(constraint.choices.texts)))
        case _:
            return None


def _write_constraint(constraint: Constraint | None) -> pb.Constraint | None:
    if constraint is None:
        return None
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return pb.Constraint(json_object=True)
        case ConstraintKind.CHOICE:
            return pb.Constraint(choices=pb.Choices(texts=json.loads(constraint.text)))
        case ConstraintKind.JSON_SCHEMA:
            return pb.Constraint(json_schema=constraint.text)
        case ConstraintKind.REGEX:
            return pb.Constraint(regex=constraint.text)
        case ConstraintKind.GRAMMAR:
            return pb.Constraint(grammar=constraint.text)


def _write_logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def _read_logprobs(logprobs: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(logprobs.logprob, list(logprobs.top_ids), list(logprobs.top_logprobs))


def _read_matched_stop(finished: pb.Finished) -> int | str | None:
    match finished.WhichOneof("matched_stop"):
        case "stop_token_id":
            return finished.stop_token_id
        case "stop_text":
            return finished.stop_text
        case _:
            return None


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
