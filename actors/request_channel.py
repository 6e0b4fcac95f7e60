"""The request channel: what a gateway and an attention worker say to each other, and its codec.

One ordered byte stream per (gateway, attention worker). A message is a little-endian uint32 length
and a msgpack map with a `type` tag. Gateway to worker: `Submit`, `Cancel`, `Credit`, `FlushCache`.
Worker to gateway: `Welcome` once, then one `StepReport` per step that has news for this gateway:
new tokens of all its requests together, and the requests that ended; between them `PrefixNews`,
`Draining`, `CacheFlushed` and `WorkerLevels`. Every submitted (request, attempt) ends in exactly
one `Ended`.

Moving: a worker that drains ends attempts with `MOVED`; a worker that is lost ends them by the
connection's end. The gateway then submits the request to another worker as the next attempt, with
the tokens so far in `generated_ids` and the last `SavedSnapshot` of the request in `snapshot`. The
new worker restores the snapshot, or computes again where that is cheaper or the snapshot is gone,
damaged or of something else: the tokens are the same.

Flow control: a worker generates at most `Submit.credit_tokens` + all `Credit.num_tokens` tokens of
a request, then pauses it until more credit comes, so a slow reader costs bounded memory and delays
nobody else. For a score the same two fields count prompt rows: the worker computes at most so many
rows. Chunks of a prompt end on a grid of `ROW_GRID` positions or at its end, so a score makes
progress only with credit up to the next such position; grant multiples of `ROW_GRID`.

A submission with `num_choices` n > 1 is n requests that share one prompt: choice c is named
`choice_id(request_id, c)`, has its own tokens, credit, `Cancel` and `Ended`, and draws with
`Sampling.choice + c`. Their prompt is computed once where memory allows it.

Times are durations: clocks of two machines are never compared.
"""

from __future__ import annotations

from typing import Final

import msgspec

from configs.errors import FrameError
from configs.ids import RequestId, WorkerId
from configs.numerics import EndReason, FinishReason

MAX_MESSAGE_BYTES: Final = 64 << 20
LENGTH_BYTES: Final = 4
ROW_GRID: Final = 16
"""Credit of scores is granted in multiples of this many rows; the rest of a prompt may be less."""


def choice_id(request_id: RequestId, choice: int) -> RequestId:
    """Name of one of the answers that a submission asks for; the first bears its own name.

    >>> choice_id(RequestId("g0-7"), 0), choice_id(RequestId("g0-7"), 2)
    ('g0-7', 'g0-7.2')
    """
    return request_id if choice == 0 else RequestId(f"{request_id}.{choice}")


class Sampling(msgspec.Struct, frozen=True):
    """How the next token is chosen. Temperature 0 is greedy.

    Order: logit bias, then repetition, presence and frequency penalty, then end tokens are ruled
    out before `min_tokens`, then the grammar's mask, then temperature, top-k, top-p, min-p, draw.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    """Nucleus mass, 0 < top_p <= 1."""
    top_k: int = 0
    """0 keeps all."""
    seed: int = 0
    """Philox key; the gateway draws one at admission when the client gives none."""
    choice: int = 0
    """Second part of the Philox counter: answers of one seed and prompt differ by it."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """> 0. Logits of tokens in prompt or answer: positive ones divided, others multiplied by it."""
    presence_penalty: float = 0.0
    """Taken once from the logits of tokens that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken from the logits of tokens in the answer, once per occurrence."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    min_tokens: int = 0
    """`Submit.stop_token_ids` cannot be chosen before the answer has so many tokens."""


class SnapshotPlace(msgspec.Struct, frozen=True):
    """Where a copy of a request's memory lies that left its worker."""

    address: str
    """`folder:<path>`, or the address of a worker's vault: `unix:<path>` or `tcp:<host>:<port>`."""
    name: str
    """Names it there; `[a-zA-Z0-9._-]` only."""
    position: int
    """Tokens of the request that it holds."""
    num_bytes: int
    worker: WorkerId = WorkerId("")
    """The worker whose memory it is in; "" for a folder."""


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run a request."""

    request_id: RequestId
    attempt: int
    token_ids: list[int]
    """Prompt, not empty."""
    max_tokens: int
    """Tokens to generate; 0 for a score."""
    sampling: Sampling
    stop_token_ids: list[int]
    timeout_s: float | None = None
    """Seconds left of the client's deadline; None has none."""
    credit_tokens: int = 4096
    """Tokens that may be generated, or prompt rows that a score may compute, before `Credit`."""
    want_logits: bool = False
    """Return the float32 logits of every prompt position (a score) in `LogitRows`."""
    generated_ids: list[int] = []
    """Tokens that an earlier attempt generated; replayed in decode form, not reported again.

    Only with one choice.
    """
    num_choices: int = 1
    """Answers to this prompt, see the module's docstring."""
    grammar: str = ""
    """What the answer must match, made by `model.constraint.compile_constraint`; "" has none."""
    logprobs: int | None = None
    """Report the log-probability of each token and of so many most likely ones, unless None."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, in `PromptLogprobs` of the first choice."""
    priority: int = 0
    """Lower is served earlier, -100 to 100. One more is worth `PRIORITY_WAIT_S` of waiting."""
    snapshot: SnapshotPlace | None = None
    """What an earlier attempt left; only with one choice."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop a request; answered by `Ended(CANCELLED)` unless it has already ended."""

    request_id: RequestId
    attempt: int


class Credit(msgspec.Struct, frozen=True, tag="credit"):
    """Allow more tokens of a request, or more rows of a score."""

    request_id: RequestId
    attempt: int
    num_tokens: int


class FlushCache(msgspec.Struct, frozen=True, tag="flush"):
    """Forget every prefix that no running request uses; answered by `CacheFlushed`."""

    flush_id: int
    """Chosen by the gateway, repeated in the answer."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """First message of a worker to a gateway that connected."""

    worker: WorkerId
    generation: int
    max_request_tokens: int
    """Prompt and generated tokens of one request that can ever fit this worker."""
    block_tokens: int = 64
    """Tokens per link of the chains in `PrefixNews`."""
    is_draining: bool = False
    """Takes no new requests."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position: of the model's own logits at temperature 1.

    Before bias, penalties, temperature and masks.
    """

    logprob: float
    """Of the token that is there."""
    top_ids: list[int] = []
    """The most likely tokens, most likely first, equal ones by lower id."""
    top_logprobs: list[float] = []
    """Theirs."""


class NewTokens(msgspec.Struct, frozen=True):
    """Tokens that a step gave one request."""

    request_id: RequestId
    attempt: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """One per token when `Submit.logprobs` is set, else empty."""


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of consecutive prompt tokens. Position 0 has none and is never reported."""

    request_id: RequestId
    attempt: int
    first_position: int
    logprobs: list[TokenLogprobs]


class LogitRows(msgspec.Struct, frozen=True):
    """Logits of consecutive prompt positions, for a request with `want_logits`."""

    request_id: RequestId
    attempt: int
    first_position: int
    num_rows: int
    data: bytes
    """float32 little-endian, `[num_rows, vocab]`."""


class Usage(msgspec.Struct, frozen=True):
    """What a request cost."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that were computed, not taken from a cache."""
    output_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    """From arrival at the worker to the first token; 0 when there was none."""
    total_s: float = 0.0


class Ended(msgspec.Struct, frozen=True):
    """The one end of a (request, attempt)."""

    request_id: RequestId
    attempt: int
    reason: EndReason
    usage: Usage
    finish_reason: FinishReason | None = None
    """Set when `reason` is FINISHED."""
    error_code: str = ""
    """`ServingError.code` of the cause when `reason` is REJECTED or FAILED."""
    error_message: str = ""


class SavedSnapshot(msgspec.Struct, frozen=True):
    """A copy of a request's memory has arrived at a place outside its worker."""

    request_id: RequestId
    attempt: int
    place: SnapshotPlace


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """News of one step for one gateway. Tokens and `saved` come before ends in the same report.

    All `PromptLogprobs` of a request come before its first token.
    """

    step: int
    tokens: list[NewTokens] = []
    logits: list[LogitRows] = []
    prompt_logprobs: list[PromptLogprobs] = []
    ended: list[Ended] = []
    saved: list[SavedSnapshot] = []


class PrefixNews(msgspec.Struct, frozen=True, tag="prefixes"):
    """What the prefix cache of a worker gained and lost, as ends of chains of whole blocks.

    A key is the last of `actors.prefix_chain.chain_keys` of the tokens before a snapshot; prompts
    that begin with them find it. For choosing a worker only: the worker itself looks again.
    """

    epoch: int
    """Grows by one per message; the first message after `Welcome` holds all there is."""
    added: list[bytes] = []
    removed: list[bytes] = []


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The worker takes no new requests from now on."""


class LevelSample(msgspec.Struct, frozen=True, array_like=True):
    """One value of a metric of `configs/metrics.py` whose source is a worker."""

    metric: str
    value: float
    labels: dict[str, str] = {}
    """But `worker`, which the gateway adds."""


class WorkerLevels(msgspec.Struct, frozen=True, tag="levels"):
    """The metrics of a worker, all of them; sent now and then while they change."""

    samples: list[LevelSample]


class CacheFlushed(msgspec.Struct, frozen=True, tag="flushed"):
    """Answer to `FlushCache`."""

    flush_id: int
    num_snapshots: int
    """Snapshots that were forgotten."""


PRIORITY_WAIT_S: Final = 60.0
"""A request of priority p is served as if it had arrived p times so many seconds later."""

ToWorker = Submit | Cancel | Credit | FlushCache
ToGateway = Welcome | StepReport | PrefixNews | Draining | CacheFlushed | WorkerLevels

_encoder = msgspec.msgpack.Encoder()
_to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_gateway_decoder: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)


def encode_message(message: ToWorker | ToGateway) -> bytes:
    """Return length and body of a message.

    Raises:
        FrameError: The message exceeds `MAX_MESSAGE_BYTES`.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise FrameError(
            f"request-channel message of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}"
        )
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def decode_length(data: bytes) -> int:
    """Return the body length that the `LENGTH_BYTES` bytes of a prefix state.

    Raises:
        FrameError: It exceeds `MAX_MESSAGE_BYTES`.
    """
    length = int.from_bytes(data, "little")
    if length > MAX_MESSAGE_BYTES:
        raise FrameError(f"request-channel message of {length} bytes exceeds {MAX_MESSAGE_BYTES}")
    return length


def decode_to_worker(body: bytes) -> ToWorker:
    """Parse the body of a message from a gateway. Raises `FrameError` for anything else."""
    try:
        return _to_worker_decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise FrameError(f"not a request-channel message: {exc}") from exc


def decode_to_gateway(body: bytes) -> ToGateway:
    """Parse the body of a message from a worker. Raises `FrameError` for anything else."""
    try:
        return _to_gateway_decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise FrameError(f"not a request-channel message: {exc}") from exc
