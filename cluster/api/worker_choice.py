"""Which attention worker runs a request: a pure function of what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from configs.errors import NoWorkerError, RequestTooLargeError
from configs.ids import WorkerId

PREFIX_EXTRA_REQUESTS: Final = 4
"""Requests that a worker with a cached prefix may have more than the least loaded one."""
PREFIX_TOKENS_PER_REQUEST: Final = 1024
"""Each so many cached tokens outweigh one request more."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the choice of a worker looks at."""

    worker: WorkerId
    num_open: int
    """Requests of this gateway there."""
    max_request_tokens: int
    is_draining: bool = False
    """It takes no new requests."""
    prefix_tokens: int = 0
    """Tokens of the prompt that its cache holds, as far as this gateway knows."""


def choose_worker(loads: Sequence[WorkerLoad], num_tokens: int) -> WorkerId:
    """Return the worker that runs a request of `num_tokens` tokens of prompt and answer.

    Among those that do not drain and can hold it, the one that has the longest prefix of the prompt
    in its cache; ties go to the one with fewer requests, then to the first name. A prefix counts
    only while its worker has at most `PREFIX_EXTRA_REQUESTS` + (prefix tokens) //
    `PREFIX_TOKENS_PER_REQUEST` requests more than the least loaded: past that, waiting for it costs
    more than to compute the prefix again elsewhere. Without a prefix that counts, the least loaded
    worker is chosen.

    Raises:
        NoWorkerError: There is no worker, or all drain.
        RequestTooLargeError: None can ever hold so many tokens.
    """
    usable = [load for load in loads if not load.is_draining]
    if not usable:
        raise NoWorkerError("no attention worker is connected; retry in a moment")
    fitting = [load for load in usable if load.max_request_tokens >= num_tokens]
    if not fitting:
        limit = max(load.max_request_tokens for load in usable)
        raise RequestTooLargeError(
            f"prompt and answer of {num_tokens} tokens exceed the {limit} that fit a worker's "
            "memory; shorten the prompt or max_tokens, or raise attention_pool.num_blocks"
        )
    least = min(load.num_open for load in fitting)

    def rank(load: WorkerLoad) -> tuple[int, int, WorkerId]:
        room = PREFIX_EXTRA_REQUESTS + load.prefix_tokens // PREFIX_TOKENS_PER_REQUEST
        counted = load.prefix_tokens if load.num_open <= least + room else 0
        return -counted, load.num_open, load.worker

    return min(fitting, key=rank).worker
