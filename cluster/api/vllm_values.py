"""Between the messages of vllm.grpc.engine and our own values, both ways.

In that protocol 0 means unset for `top_p`, `top_k`, `repetition_penalty` and `n`; an unset
temperature is 1. What the protocol offers and this server does not is refused here, by name: a
request that ran without it would be another request. Values out of range are left to
`cluster/api/validation.py`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.request_channel import TokenLogprobs
from cluster.api.answers import Chunk, Finished
from cluster.api.params import GenerateParams, SamplingParams, StopParams
from configs.errors import InvalidRequestError
from model.constraint import Constraint, ConstraintKind

DEFAULT_TEMPERATURE: Final = 1.0
_RANDOM_SEED: Final = -1
"""What clients of this protocol send for "draw one"."""
_NUM_SEEDS: Final = 1 << 64
_ABORT: Final = "abort"


def read_generate(request: pb.GenerateRequest) -> GenerateParams:
    """Return what a request asks for, its prompt uncut. Token ids stay in the message.

    Raises:
        InvalidRequestError: It asks for what is not offered: media, a transfer of caches, a rank,
            a structural tag, all log-probabilities.
    """
    _refuse_foreign(request)
    wanted = request.sampling_params
    return GenerateParams(
        prompt=_prompt_of(request),
        max_tokens=wanted.max_tokens if wanted.HasField("max_tokens") else None,
        sampling=SamplingParams(
            temperature=wanted.temperature
            if wanted.HasField("temperature")
            else DEFAULT_TEMPERATURE,
            top_p=wanted.top_p or None,
            top_k=wanted.top_k or None,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty or None,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            logit_bias=wanted.logit_bias,
            seed=_seed_of(wanted),
        ),
        stop=StopParams(
            texts=wanted.stop,
            token_ids=wanted.stop_token_ids,
            ignore_eos=wanted.ignore_eos,
            min_tokens=wanted.min_tokens,
            include_text=wanted.include_stop_str_in_output,
        ),
        num_choices=wanted.n or 1,
        constraint=_constraint_of(wanted),
        logprobs=_count_of(wanted, "logprobs"),
        prompt_logprobs=_count_of(wanted, "prompt_logprobs"),
    )


def truncate_prompt(
    prompt: Sequence[int], wanted: pb.SamplingParams, *, context_tokens: int
) -> Sequence[int]:
    """Return the last tokens of a prompt, as many as `truncate_prompt_tokens` asks for.

    Args:
        prompt: All of its tokens.
        wanted: -1 there keeps what the context holds beside `max_tokens`, or beside 1 token.
        context_tokens: Tokens of prompt and answer together.

    Raises:
        InvalidRequestError: `truncate_prompt_tokens` is neither -1 nor positive.
    """
    if not wanted.HasField("truncate_prompt_tokens"):
        return prompt
    num_kept = wanted.truncate_prompt_tokens
    if num_kept < -1 or num_kept == 0:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {num_kept}; allowed: 1 or more (that many of the last "
            "tokens are kept), -1 (what the context holds), or unset"
        )
    if num_kept == -1:
        num_answer = wanted.max_tokens if wanted.HasField("max_tokens") else 1
        num_kept = max(1, context_tokens - max(1, num_answer))
    return prompt[-num_kept:]


@dataclass(slots=True)
class _Choice:
    """What one choice has said so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_finished: bool = False


class AnswerMessages:
    """Makes the messages of one answer from its events, in order.

    Counts are cumulative per choice. The log-probabilities of the prompt are in the first chunk of
    every choice and in its end; the end also repeats ids and log-probabilities of the whole choice.

    Args:
        num_choices: Answers that will end.
        is_stream: Whether chunks are wanted, or ends only.
    """

    def __init__(self, *, num_choices: int, is_stream: bool) -> None:
        self.prompt: Sequence[int] = ()
        """Token ids; to be set before the first event."""
        self._num_choices = num_choices
        self._is_stream = is_stream
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._prompt_logprobs: list[TokenLogprobs] = []

    def of_event(self, event: Chunk | Finished) -> pb.GenerateResponse | None:
        """Return the message of an event; None when nothing is to be sent yet."""
        if isinstance(event, Finished):
            return self._of_end(event)
        self._prompt_logprobs.extend(event.prompt_logprobs)
        if not event.token_ids:
            return None
        choice = self._choices[event.choice]
        is_first = not choice.token_ids
        choice.token_ids.extend(event.token_ids)
        choice.logprobs.extend(event.logprobs)
        if not self._is_stream:
            return None
        return pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(
                token_ids=event.token_ids,
                prompt_tokens=len(self.prompt),
                completion_tokens=len(choice.token_ids),
                output_logprobs=_output_logprobs(event.token_ids, event.logprobs),
                input_logprobs=self._input_logprobs() if is_first else None,
                index=event.choice,
            )
        )

    def aborted(self) -> Iterator[pb.GenerateResponse]:
        """Return the ends of all choices that have not ended."""
        for index in range(self._num_choices):
            if not self._choices[index].is_finished:
                yield self._end(index, finish_reason=_ABORT)

    def _of_end(self, event: Finished) -> pb.GenerateResponse:
        usage, stop = event.usage, event.matched_stop
        return self._end(
            event.choice,
            finish_reason=event.finish_reason.value,
            cached_tokens=max(0, usage.prompt_tokens - usage.computed_tokens),
            matched_token_id=stop if isinstance(stop, int) else None,
            matched_stop_str=stop if isinstance(stop, str) else None,
        )

    def _end(self, index: int, **fields: Any) -> pb.GenerateResponse:  # noqa: ANN401 - proto fields
        choice = self._choices[index]
        choice.is_finished = True
        return pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=choice.token_ids,
                prompt_tokens=len(self.prompt),
                completion_tokens=len(choice.token_ids),
                output_logprobs=_output_logprobs(choice.token_ids, choice.logprobs),
                input_logprobs=self._input_logprobs(),
                index=index,
                **fields,
            )
        )

    def _input_logprobs(self) -> pb.InputLogProbs | None:
        if not self._prompt_logprobs:
            return None
        # The first token of a prompt has none; its place is kept.
        message = pb.InputLogProbs(token_ids=self.prompt, token_logprobs=[pb.InputTokenLogProb()])
        message.token_logprobs.extend(
            pb.InputTokenLogProb(value=entry.logprob) for entry in self._prompt_logprobs
        )
        if any(entry.top_ids for entry in self._prompt_logprobs):
            message.top_logprobs.append(pb.TopLogProbs())
            message.top_logprobs.extend(map(_top_logprobs, self._prompt_logprobs))
        return message


def _refuse_foreign(request: pb.GenerateRequest) -> None:
    has_media = request.HasField("mm_inputs") or len(request.extra_mm_inputs) > 0
    if has_media or len(request.media_refs.items) > 0:
        raise InvalidRequestError(
            "mm_inputs, extra_mm_inputs and media_refs: this server takes text and token ids only; "
            "leave them unset"
        )
    if request.HasField("kv_transfer_params") or request.kv_transfer_params_json:
        raise InvalidRequestError(
            "kv_transfer_params and kv_transfer_params_json: prefill and decode run in the same "
            "worker here; send the request once, without them"
        )
    if request.data_parallel_rank != 0:
        raise InvalidRequestError(
            f"data_parallel_rank is {request.data_parallel_rank}; allowed: 0 or unset (this server "
            "chooses the worker itself)"
        )


def _prompt_of(request: pb.GenerateRequest) -> str | Sequence[int] | None:
    match request.WhichOneof("input"):
        case "text":
            return str(request.text)
        case "tokenized":
            # Not copied: a list that is refused for its length alone may hold millions.
            ids: Sequence[int] = request.tokenized.input_ids
            return ids
        case _:
            return None


def _seed_of(wanted: pb.SamplingParams) -> int | None:
    if not wanted.HasField("seed") or wanted.seed == _RANDOM_SEED:
        return None
    seed: int = wanted.seed % _NUM_SEEDS
    return seed


def _count_of(wanted: pb.SamplingParams, name: str) -> int | None:
    if not wanted.HasField(name):
        return None
    count: int = getattr(wanted, name)
    if count < 0:
        raise InvalidRequestError(
            f"{name} is {count}: the log-probabilities of the whole vocabulary are not returned; "
            "ask for a number of the most likely tokens, or use latentmesh.v1 Score"
        )
    return count


def _constraint_of(wanted: pb.SamplingParams) -> Constraint | None:
    # Grammars start at the first token here, as `grammar_from_first_token` asks.
    match wanted.WhichOneof("constraint"):
        case "json_schema":
            return Constraint(ConstraintKind.JSON_SCHEMA, wanted.json_schema)
        case "json_object":
            return Constraint(ConstraintKind.JSON_OBJECT) if wanted.json_object else None
        case "regex":
            return Constraint(ConstraintKind.REGEX, wanted.regex)
        case "grammar":
            return Constraint(ConstraintKind.GRAMMAR, wanted.grammar)
        case "choice":
            return Constraint(ConstraintKind.CHOICE, json.dumps(list(wanted.choice.choices)))
        case "structural_tag":
            raise InvalidRequestError(
                "structural_tag is not offered; write the constraint as json_schema, regex, "
                "grammar or choice"
            )
        case _:
            return None


def _output_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> pb.OutputLogProbs | None:
    if not entries:
        return None
    has_top = any(entry.top_ids for entry in entries)
    return pb.OutputLogProbs(
        token_ids=token_ids,
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=map(_top_logprobs, entries) if has_top else (),
    )


def _top_logprobs(entry: TokenLogprobs) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids)
