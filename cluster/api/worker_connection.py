"""The connection of a gateway to one attention worker: made, used, lost and made again.

While it is up, reports are handed to the streams they belong to, by (request, attempt); when it is
lost, every open stream leaves the worker, which takes no requests until the connection is back. A
worker that drains keeps its streams until they end or it gives them up.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final

from actors.request_channel import (
    CacheFlushed,
    Draining,
    Ended,
    FlushCache,
    LevelSample,
    PrefixNews,
    StepReport,
    Submit,
    ToWorker,
    Usage,
    Welcome,
    WorkerLevels,
)
from actors.request_client import RequestClient, WorkerNews
from cluster.api.gateway_settings import AttentionEndpoint
from cluster.api.prefix_map import PrefixMap
from cluster.api.request_outcome import Departure, LeaveReason, departure_of
from cluster.api.request_stream import RequestKey, RequestStream
from configs.errors import FrameError, TransportError, WorkerError
from configs.ids import WorkerId

CLOSE_TIMEOUT_S: Final = 2.0
FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0

_log = logging.getLogger(__name__)


class WorkerConnection:
    """One attention worker as a gateway sees it. Belongs to one event loop.

    Args:
        endpoint: The worker.
        prefixes: Learns what the worker's cache holds.
        first_attempt: Number of the attempts that no other worker had before.
        on_change: Called when the worker becomes usable, drains or is lost.
        on_lost: Called besides when an established connection ends unasked.
        on_left: Called with each stream whose attempt the worker does not finish, also where the
            reader has left.
        on_levels: Called with the metrics of the worker; empty when it is lost.
    """

    def __init__(
        self,
        endpoint: AttentionEndpoint,
        *,
        prefixes: PrefixMap,
        first_attempt: int,
        on_change: Callable[[], None],
        on_lost: Callable[[AttentionEndpoint], None],
        on_left: Callable[[RequestStream, Departure], None],
        on_levels: Callable[[WorkerId, Sequence[LevelSample]], None],
    ) -> None:
        self.endpoint = endpoint
        self._prefixes = prefixes
        self._first_attempt = first_attempt
        self._on_change = on_change
        self._on_lost = on_lost
        self._on_left = on_left
        self._on_levels = on_levels
        self._welcome: Welcome | None = None
        self._is_draining = False
        self._flushes: dict[int, asyncio.Future[int]] = {}
        self._flush_ids = itertools.count(1)
        self._streams: dict[RequestKey, RequestStream] = {}
        self._outbox: asyncio.Queue[ToWorker] = asyncio.Queue()
        self._was_tried = asyncio.Event()
        self._first_error: TransportError | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def welcome(self) -> Welcome | None:
        """What the worker said when it was connected; None while it is not."""
        return self._welcome

    @property
    def is_usable(self) -> bool:
        """Whether the worker takes new requests: it is connected and does not drain."""
        return self._welcome is not None and not self._is_draining

    @property
    def num_open(self) -> int:
        """Requests that the worker has not ended yet."""
        return len(self._streams)

    async def start(self) -> None:
        """Begin to connect and wait for the first try. Called once.

        Raises:
            TransportError: It failed; further tries go on until `close`.
        """
        self._task = asyncio.create_task(self._run(), name=f"connection to {self.endpoint.worker}")
        self._task.add_done_callback(_log_crash)
        await self._was_tried.wait()
        if self._first_error is not None:
            raise self._first_error

    def submit(self, submit: Submit, streams: Sequence[RequestStream]) -> None:
        """Send a request whose news go to `streams`, one per choice.

        Raises:
            WorkerError: The worker is not connected.
        """
        if self._welcome is None:
            raise WorkerError(f"attention worker {self.endpoint.worker} is not connected; retry")
        self._streams.update((stream.key, stream) for stream in streams)
        self._outbox.put_nowait(submit)

    def post(self, message: ToWorker) -> None:
        """Send a message about a request; nothing happens when the connection is gone."""
        if self._welcome is not None:
            self._outbox.put_nowait(message)

    async def flush_cache(self) -> int:
        """Make the worker forget the prefixes that no request uses, and return their number.

        Waits as long as the caller does.

        Raises:
            WorkerError: The worker is not connected, or was lost before it answered.
        """
        if self._welcome is None:
            raise WorkerError(f"attention worker {self.endpoint.worker} is not connected; retry")
        flush_id = next(self._flush_ids)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes[flush_id] = answer
        self._outbox.put_nowait(FlushCache(flush_id))
        try:
            return await answer
        finally:
            self._flushes.pop(flush_id, None)

    async def close(self) -> None:
        """End the connection; open streams leave. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                client = await self._connect()
            except TransportError as exc:
                if not self._was_tried.is_set():
                    self._first_error = exc
                    self._was_tried.set()
                _log.warning("%s; next try in %.1f s", exc, backoff_s)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
                continue
            backoff_s = FIRST_BACKOFF_S
            await self._serve(client)

    async def _connect(self) -> RequestClient:
        worker, address = self.endpoint.worker, self.endpoint.address
        try:
            client = await RequestClient.connect(address)
        except FrameError as exc:
            raise TransportError(f"{address} is no attention worker: {exc}") from exc
        if client.welcome.worker != worker:
            await _close(client)
            raise TransportError(
                f"{address} belongs to {client.welcome.worker}, expected attention worker {worker}"
            )
        return client

    async def _serve(self, client: RequestClient) -> None:
        self._outbox = asyncio.Queue()
        self._welcome = client.welcome
        self._is_draining = client.welcome.is_draining
        if not self._is_draining:
            self._prefixes.add_worker(self.endpoint.worker, client.welcome.block_tokens)
        self._was_tried.set()
        self._on_change()
        sender = asyncio.create_task(self._send_all(client, self._outbox))
        reason = "it closed the connection"
        try:
            async for news in client:
                self._take(news)
        except (TransportError, FrameError) as exc:
            reason = str(exc)
        except asyncio.CancelledError:
            reason = "the gateway was stopped"
            raise
        finally:
            self._lose(reason)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            await _close(client)
        self._on_lost(self.endpoint)

    async def _send_all(self, client: RequestClient, outbox: asyncio.Queue[ToWorker]) -> None:
        try:
            while True:
                await client.send(await outbox.get())
        except TransportError as exc:
            # The reader sees the end of the connection too, and tells the streams.
            _log.warning("sending to attention worker %s: %s", self.endpoint.worker, exc)
            await _close(client)

    def _take(self, news: WorkerNews) -> None:
        match news:
            case StepReport():
                self._deliver(news)
            case PrefixNews():
                self._prefixes.take(self.endpoint.worker, news)
            case Draining():
                self._is_draining = True
                self._prefixes.drop_worker(self.endpoint.worker)
                _log.info("attention worker %s drains", self.endpoint.worker)
                self._on_change()
            case WorkerLevels():
                self._on_levels(self.endpoint.worker, news.samples)
            case CacheFlushed():
                answer = self._flushes.get(news.flush_id)
                if answer is not None and not answer.done():
                    answer.set_result(news.num_snapshots)

    def _deliver(self, report: StepReport) -> None:
        # Never waits: a reader that is behind must not hold up the worker's other streams.
        for logprobs in report.prompt_logprobs:
            stream = self._streams.get(RequestKey(logprobs.request_id, logprobs.attempt))
            if stream is not None:
                stream.put_prompt_logprobs(logprobs)
        for tokens in report.tokens:
            stream = self._streams.get(RequestKey(tokens.request_id, tokens.attempt))
            if stream is not None:
                stream.put_tokens(tokens.token_ids, tokens.logprobs)
        for rows in report.logits:
            stream = self._streams.get(RequestKey(rows.request_id, rows.attempt))
            if stream is not None:
                stream.put_rows(rows)
        for saved in report.saved:
            stream = self._streams.get(RequestKey(saved.request_id, saved.attempt))
            if stream is not None:
                stream.put_snapshot(saved.place)
        for ended in report.ended:
            self._end(ended)

    def _end(self, ended: Ended) -> None:
        stream = self._streams.pop(RequestKey(ended.request_id, ended.attempt), None)
        if stream is None:
            return
        departure = departure_of(ended, self.endpoint.worker, first_attempt=self._first_attempt)
        if departure is None:
            stream.put_end(ended)
        else:
            self._on_left(stream, departure)

    def _lose(self, reason: str) -> None:
        self._welcome = None
        self._is_draining = False
        worker = self.endpoint.worker
        self._prefixes.drop_worker(worker)
        self._on_levels(worker, [])
        for answer in self._flushes.values():
            if not answer.done():
                answer.set_exception(
                    WorkerError(f"attention worker {worker} was lost ({reason}); retry")
                )
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            error = WorkerError(
                f"request {stream.key.request_id}: attention worker {worker} was lost ({reason}); "
                "retry"
            )
            self._on_left(stream, Departure(worker, LeaveReason.LOST, error, Usage()))
        self._on_change()


async def _close(client: RequestClient) -> None:
    # A worker that does not read keeps its socket from flushing; it must not keep us.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await client.close()


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("%s ended by an unforeseen error", task.get_name(), exc_info=task.exception())
