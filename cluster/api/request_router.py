"""Which requests one gateway carries, and on which attention workers they run.

Owns the connections and the streams of the requests that were accepted. The choice of a worker is
`cluster/api/worker_choice.py`; requests that leave their worker are the mover's.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from actors.request_channel import Submit
from cluster.api.cache_flush import FlushResult, flush_caches
from cluster.api.gateway_settings import AttentionEndpoint, GatewaySettings
from cluster.api.prefix_map import PrefixMap
from cluster.api.request_mover import RequestMover, list_loads
from cluster.api.request_outcome import Departure, LeaveReason, Outcome
from cluster.api.request_spec import Operation, RequestSpec
from cluster.api.request_stream import CREDIT_TOKENS, RequestStream, row_window
from cluster.api.worker_choice import choose_worker
from cluster.api.worker_connection import WorkerConnection
from cluster.telemetry import Metrics
from configs.errors import (
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    ServingError,
    ShuttingDownError,
    TransportError,
)
from configs.ids import RequestId
from configs.metrics import (
    CONNECTED_WORKERS,
    LOST_CONNECTIONS,
    MOVED_REQUESTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    RUNNING_REQUESTS,
)

FIRST_ATTEMPT: Final = 1


def draw_seed() -> int:
    """Return a random seed below 2^63, which every client language can hold."""
    return secrets.randbits(63)


class RequestRouter:
    """Accepts requests and hands out their streams. Belongs to one event loop.

    `changed` is set whenever a worker is connected or lost, or draining begins; whoever watches
    clears it.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        endpoints: Sequence[AttentionEndpoint],
        metrics: Metrics,
        *,
        draw_seed: Callable[[], int] = draw_seed,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._draw_seed = draw_seed
        self._counter = itertools.count(1)
        self._running: set[RequestStream] = set()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.changed = asyncio.Event()
        self._prefixes = PrefixMap()
        self._connections = {
            endpoint.worker: WorkerConnection(
                endpoint,
                prefixes=self._prefixes,
                first_attempt=FIRST_ATTEMPT,
                on_change=self._on_change,
                on_lost=self._on_lost,
                on_left=self._on_left,
                on_levels=metrics.report,
            )
            for endpoint in endpoints
        }
        self._mover = RequestMover(
            self._connections,
            self._prefixes,
            timeout_s=settings.move_timeout_s,
            on_moved=self._on_moved,
        )
        metrics.track(RUNNING_REQUESTS, lambda: len(self._running))
        metrics.track(CONNECTED_WORKERS, lambda: self.num_connected)

    @property
    def num_connected(self) -> int:
        """Workers that take requests: connected and not draining."""
        return sum(link.is_usable for link in self._connections.values())

    @property
    def num_running(self) -> int:
        """Accepted requests whose readers have not left."""
        return len(self._running)

    @property
    def is_serving(self) -> bool:
        """Whether a new request would be taken to a worker."""
        return not self._is_draining and self.num_connected > 0

    @property
    def max_request_tokens(self) -> int:
        """Tokens of prompt and answer that the roomiest connected worker can hold.

        Raises:
            NoWorkerError: No worker is connected.
        """
        self._check_open()
        return max(
            link.welcome.max_request_tokens
            for link in self._connections.values()
            if link.welcome is not None and link.is_usable
        )

    async def connect(self) -> None:
        """Begin to connect, and wait until every worker was tried once. Called once.

        Raises:
            TransportError: None of them could be reached; the first one's error.
        """
        results = await asyncio.gather(
            *(link.start() for link in self._connections.values()), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if len(failures) == len(results):
            names = ", ".join(str(endpoint) for endpoint in self._connections)
            cause = failures[0] if failures else None
            raise TransportError(
                f"none of the attention workers ({names}) can be reached: {cause}"
            ) from cause

    def open(self, spec: RequestSpec) -> list[RequestStream]:
        """Accept a request and send it to a worker; its reader must close all streams.

        Returns:
            One stream per choice, in order.

        Raises:
            NoWorkerError: Draining, or no worker is connected.
            OverloadedError: The gateway carries `max_running_requests` already.
            InvalidRequestError: More choices than a gateway ever carries.
            RequestTooLargeError: No worker can hold it.
        """
        self._check_open()
        limit = self._settings.max_running_requests
        if spec.num_choices > limit:
            raise InvalidRequestError(
                f"num_choices is {spec.num_choices}; allowed: 1 to {limit} "
                "(api.max_running_requests: each choice counts as a request)"
            )
        if len(self._running) + spec.num_choices > limit:
            raise OverloadedError(
                f"gateway {self._settings.gateway} carries {len(self._running)} requests and was "
                f"asked for {spec.num_choices} more (limit {limit}, api.max_running_requests); "
                "retry later"
            )
        loads = list_loads(self._connections, self._prefixes, spec.token_ids)
        worker = choose_worker(loads, len(spec.token_ids) + spec.max_tokens)
        connection = self._connections[worker]
        submit = self._submit_of(spec)
        streams = [
            RequestStream(
                submit,
                choice=choice,
                post=connection.post,
                on_settled=partial(self._on_settled, spec.operation, choice),
                on_closed=self._on_closed,
            )
            for choice in range(spec.num_choices)
        ]
        connection.submit(submit, streams)
        self._running.update(streams)
        self._idle.clear()
        return streams

    async def flush_cache(self) -> FlushResult:
        """Make every connected worker forget the prefixes that no request uses.

        Raises:
            NoWorkerError: None is connected.
        """
        links = [link for link in self._connections.values() if link.welcome is not None]
        if not links:
            raise NoWorkerError("no attention worker is connected; retry in a moment")
        return await flush_caches(links)

    def drain(self) -> None:
        """Take no new requests. Running ones go on."""
        self._is_draining = True
        self.changed.set()

    async def wait_idle(self) -> None:
        """Wait until no accepted request has a reader."""
        await self._idle.wait()

    def fail_all(self, error: ServingError) -> None:
        """End every running request with an error and cancel it at its worker."""
        for stream in tuple(self._running):
            stream.fail(error)

    async def close(self) -> None:
        """End all connections; running requests fail. Idempotent."""
        self.drain()
        self._mover.close()
        await asyncio.gather(*(link.close() for link in self._connections.values()))

    def _check_open(self) -> None:
        if self._is_draining:
            raise ShuttingDownError("the server is shutting down and takes no new request")
        if self.num_connected == 0:
            raise NoWorkerError("no attention worker is connected; retry in a moment")

    def _submit_of(self, spec: RequestSpec) -> Submit:
        seed = self._draw_seed() if spec.seed is None else spec.seed
        is_score = spec.operation is Operation.SCORE
        return Submit(
            request_id=RequestId(f"{self._settings.gateway}-{next(self._counter)}"),
            attempt=FIRST_ATTEMPT,
            token_ids=spec.token_ids,
            max_tokens=spec.max_tokens,
            sampling=msgspec.structs.replace(spec.sampling, seed=seed),
            stop_token_ids=spec.stop_token_ids,
            timeout_s=spec.timeout_s,
            credit_tokens=row_window(self._settings.vocab_size) if is_score else CREDIT_TOKENS,
            want_logits=is_score,
            num_choices=spec.num_choices,
            grammar=spec.grammar,
            logprobs=spec.logprobs,
            prompt_logprobs=spec.prompt_logprobs,
            priority=spec.priority,
        )

    def _on_settled(self, operation: Operation, choice: int, outcome: Outcome) -> None:
        self._metrics.add(REQUESTS, operation=operation, end_reason=outcome.reason)
        if choice == 0:
            self._metrics.add(PROMPT_TOKENS, outcome.usage.prompt_tokens)
        self._metrics.add(OUTPUT_TOKENS, outcome.usage.output_tokens)

    def _on_closed(self, stream: RequestStream) -> None:
        self._running.discard(stream)
        self._mover.forget(stream)
        if not self._running:
            self._idle.set()

    def _on_change(self) -> None:
        self.changed.set()
        self._mover.retry()

    def _on_left(self, stream: RequestStream, departure: Departure) -> None:
        self._mover.take(stream, departure)

    def _on_moved(self, reason: LeaveReason) -> None:
        self._metrics.add(MOVED_REQUESTS, reason=reason)

    def _on_lost(self, endpoint: AttentionEndpoint) -> None:
        self._metrics.add(LOST_CONNECTIONS, worker=endpoint.worker)
