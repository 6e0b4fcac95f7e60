"""The attention worker: one engine thread, and the gateways it talks to.

The engine thread owns the engine and the router. Other threads put messages into the inbox (those
of requests with a grammar by way of a `GrammarLine`) and are never blocked; what a step gives is
handed to the sink of each gateway, which must not block either. A gateway that vanishes takes its
requests with it.

Without work the thread sleeps until a message, a wake or the next deadline of a request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from actors.engine.lanes import Clock
from actors.engine.outcome import EngineStats, StepOutcome
from actors.engine.prompt_sharing import split_choices
from actors.engine.request import RequestKey
from actors.engine.step_loop import Engine
from actors.grammar_line import GrammarLine, Made
from actors.request_channel import Cancel, Credit, StepReport, Submit, ToWorker, Welcome
from configs.errors import InvalidRequestError, NoWorkerError, ServingError, WorkerError
from configs.ids import GatewayId, WorkerId

logger = logging.getLogger(__name__)
T = TypeVar("T")
HOLD_BACKLOG_BYTES = 16 << 20
"""Requests of a gateway are held while more than this waits to be read by it."""


class Sink(Protocol):
    """Where the reports of one gateway go. Called from the engine thread; never blocks."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes taken by `send` that the gateway has not read yet."""

    def send(self, report: StepReport) -> None:
        """Take a report. A sink whose gateway is gone drops it."""


class AttentionWorker:
    """Joins an engine with its gateways. Every method but `run` may be called from any thread."""

    def __init__(
        self, *, worker: WorkerId, engine: Engine, clock: Clock, generation: int = 1
    ) -> None:
        """Take over `engine`; nothing runs before `run`."""
        self.worker = worker
        self._engine = engine
        self._clock = clock
        self._generation = generation
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._is_stopping = False
        self._is_draining = False
        self._sinks: dict[GatewayId, Sink] = {}
        self._owners: dict[RequestKey, GatewayId] = {}
        self._grammars = GrammarLine(f"grammars-{worker}", engine.make_matchers)
        self._stats = engine.stats()

    @property
    def welcome(self) -> Welcome:
        """First message for a gateway that connects."""
        return Welcome(self.worker, self._generation, self._engine.limits.max_request_tokens)

    @property
    def stats(self) -> EngineStats:
        """Engine statistics after the last step or message."""
        return self._stats

    @property
    def is_drained(self) -> bool:
        """Whether `drain` was called and no request is left."""
        stats = self._stats
        return self._is_draining and stats.num_running + stats.num_queued == 0

    def connect(self, gateway: GatewayId, sink: Sink) -> None:
        """Send the reports of `gateway` to `sink` from now on."""
        self._post(lambda: self._connect(gateway, sink))

    def disconnect(self, gateway: GatewayId) -> None:
        """Cancel all requests of a gateway that is gone. Idempotent."""
        self._post(lambda: self._disconnect(gateway))

    def handle(self, gateway: GatewayId, message: ToWorker) -> None:
        """Take a message of a connected gateway."""
        arrived_at = self._clock()

        def deliver(made: Made | None) -> None:
            self._post(lambda: self._handle(gateway, message, arrived_at, made))

        if self._grammars.concerns(message):
            self._grammars.add(message, deliver)
        else:
            deliver(None)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the engine thread between two steps, e.g. to change the placement."""
        future: Future[T] = Future()

        def run_action() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as exc:  # noqa: BLE001 - handed to the caller through the future.
                future.set_exception(exc)

        self._post(run_action)
        return future

    def set_generation(self, generation: int) -> None:
        """Membership generation that later gateways are told."""
        self._generation = generation

    def wake(self) -> None:
        """Look again: a sink has room."""
        with self._condition:
            self._is_woken = True
            self._condition.notify()

    def drain(self) -> None:
        """Refuse new requests and finish the others; see `is_drained`."""
        with self._condition:
            self._is_draining = True

    def stop(self) -> None:
        """End `run` after the current step; live requests end with FAILED."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()

    def run(self) -> None:
        """Serve until `stop`. Call once, on the thread that will own engine and router."""
        while True:
            with self._condition:
                if self._is_stopping:
                    break
                self._is_woken = False
                actions = list(self._inbox)
                self._inbox.clear()
            self._run_actions(actions)
            if not self._step():
                self._wait()
        self._finish()

    def _finish(self) -> None:
        self._grammars.close()
        with self._condition:
            actions = list(self._inbox)
            self._inbox.clear()
        self._run_actions(actions)
        self._engine.fail_all(
            WorkerError(f"attention worker {self.worker} stops; send the request to another one"),
            self._clock(),
        )
        self._report(self._engine.step(self._clock()))

    def _run_actions(self, actions: Iterable[Callable[[], None]]) -> None:
        for action in actions:
            try:
                action()
            except Exception:
                # The worker's outermost loop: one bad message must not end it.
                logger.exception("attention worker %s: a message failed", self.worker)

    def _step(self) -> bool:
        """Run one step; return whether there may be more to do at once."""
        now = self._clock()
        try:
            outcome = self._engine.step(now, held=self._held_requests())
        except Exception as exc:
            # The worker's outermost loop: the step's requests are lost, the worker is not.
            logger.exception("attention worker %s: a step failed", self.worker)
            error = exc if isinstance(exc, ServingError) else WorkerError(_describe(exc))
            self._engine.fail_running(error, self._clock())
            self._stats = self._engine.stats()
            return True
        self._report(outcome)
        return outcome.num_computed_tokens > 0

    def _wait(self) -> None:
        deadline = self._engine.next_deadline()
        timeout_s = None if deadline is None else max(0.0, deadline - self._clock())
        with self._condition:
            self._condition.wait_for(
                lambda: self._inbox or self._is_woken or self._is_stopping, timeout_s
            )

    def _post(self, action: Callable[[], None]) -> None:
        with self._condition:
            self._inbox.append(action)
            self._condition.notify()

    def _connect(self, gateway: GatewayId, sink: Sink) -> None:
        self._sinks[gateway] = sink

    def _disconnect(self, gateway: GatewayId) -> None:
        self._sinks.pop(gateway, None)
        for key in [key for key, owner in self._owners.items() if owner == gateway]:
            del self._owners[key]
            self._engine.discard(key, self._clock())

    def _handle(
        self, gateway: GatewayId, message: ToWorker, arrived_at: float, made: Made | None
    ) -> None:
        if gateway not in self._sinks:
            return  # It vanished while the message was in the inbox.
        match message:
            case Submit():
                self._submit(gateway, message, arrived_at, made)
            case Cancel():
                key = RequestKey(message.request_id, message.attempt)
                if self._owners.get(key) == gateway:
                    self._engine.cancel(key, self._clock())
            case Credit():
                key = RequestKey(message.request_id, message.attempt)
                if self._owners.get(key) == gateway:
                    self._engine.credit(key, message.num_tokens)

    def _submit(
        self, gateway: GatewayId, submit: Submit, arrived_at: float, made: Made | None
    ) -> None:
        keys = [RequestKey(one.request_id, one.attempt) for one in split_choices(submit)]
        for key in keys:
            if key in self._owners:
                # The live one keeps its one end; a second one would be taken for it.
                logger.warning("gateway %s sent %s again while it is live; ignored", gateway, key)
                return
        self._owners.update((key, gateway) for key in keys)
        if self._is_draining:
            error = NoWorkerError(f"attention worker {self.worker} drains; use another one")
            self._engine.refuse(submit, error, self._clock())
            return
        failure = None if made is None else _failure_of(made)
        if failure is not None:
            self._engine.refuse(submit, failure, self._clock())
            return
        try:
            matchers = None if made is None else made.result()
            self._engine.submit(submit, arrived_at, matchers=matchers)
        except InvalidRequestError as exc:
            for key in keys:
                del self._owners[key]
            logger.warning("gateway %s: %s", gateway, exc.message)

    def _held_requests(self) -> frozenset[RequestKey]:
        """Requests of gateways that do not read what they have been sent."""
        slow = {
            gateway
            for gateway, sink in self._sinks.items()
            if sink.backlog_bytes > HOLD_BACKLOG_BYTES
        }
        if not slow:
            return frozenset()
        return frozenset(key for key, owner in self._owners.items() if owner in slow)

    def _report(self, outcome: StepOutcome) -> None:
        self._stats = self._engine.stats()
        for gateway, report in self._split(outcome).items():
            sink = self._sinks.get(gateway)
            if sink is None:
                continue
            try:
                sink.send(report)
            except Exception:
                # The worker's outermost loop: a broken sink loses its gateway only.
                logger.exception("attention worker %s: the sink of %s failed", self.worker, gateway)
                self._disconnect(gateway)

    def _split(self, outcome: StepOutcome) -> dict[GatewayId, StepReport]:
        """Sort the news of a step by gateway and forget the owners of ended requests."""
        reports: dict[GatewayId, StepReport] = {}

        def report_of(key: RequestKey) -> StepReport | None:
            gateway = self._owners.get(key)
            if gateway is None:
                return None
            if gateway not in reports:
                reports[gateway] = StepReport(outcome.step, [], [], [], [])
            return reports[gateway]

        for kind in ("tokens", "logits", "prompt_logprobs"):
            for news in getattr(outcome, kind):
                report = report_of(RequestKey(news.request_id, news.attempt))
                if report is not None:
                    getattr(report, kind).append(news)
        for ended in outcome.ended:
            key = RequestKey(ended.request_id, ended.attempt)
            report = report_of(key)
            if report is not None:
                report.ended.append(ended)
                del self._owners[key]
        return reports


def _failure_of(made: Made) -> ServingError | None:
    """Why no matchers were made, or None."""
    if made.cancelled():
        return WorkerError("the attention worker stops; send the request to another one")
    exc = made.exception()
    if exc is None or isinstance(exc, ServingError):
        return exc
    logger.error("a grammar failed", exc_info=exc)
    return WorkerError(f"the grammar failed with {type(exc).__name__}: {exc}")


def _describe(exc: BaseException) -> str:
    return f"a step failed with {type(exc).__name__}: {exc}; the request can be tried again"
