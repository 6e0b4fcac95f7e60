"""The attention worker: one engine thread, and the gateways it talks to.

The engine thread owns the engine and the router. Other threads put messages into the inbox (those
of requests with a grammar by way of a `GrammarLine`) and are never blocked; what a step gives is
handed to the sink of each gateway, which must not block either. A gateway that vanishes takes its
requests with it.

A submission with a snapshot of an earlier attempt waits until the snapshot has been fetched, in
another thread; what comes for it meanwhile waits behind it.

Without work the thread sleeps until a message, a wake or the next deadline of a request.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from actors.engine.lanes import Clock
from actors.engine.outcome import EngineStats, StepOutcome
from actors.engine.prompt_sharing import split_choices
from actors.engine.request import RequestKey
from actors.engine.request_snapshot import RequestSnapshot
from actors.engine.step_loop import Engine
from actors.grammar_line import GrammarLine, Made
from actors.level_reporter import LevelReporter, levels_of
from actors.request_channel import (
    CacheFlushed,
    Cancel,
    Credit,
    Draining,
    FlushCache,
    PrefixNews,
    Submit,
    ToGateway,
    ToWorker,
    Welcome,
)
from actors.request_mover import RequestMover, SnapshotInlet, SnapshotOutlet
from actors.step_reports import split_outcome
from configs.errors import (
    InvalidRequestError,
    NoWorkerError,
    ServingError,
    ShuttingDownError,
    WorkerError,
)
from configs.ids import GatewayId, WorkerId
from model.constraint_vocabulary import Matcher

logger = logging.getLogger(__name__)
T = TypeVar("T")
HOLD_BACKLOG_BYTES = 16 << 20
"""Requests of a gateway are held while more than this waits to be read by it."""


class Sink(Protocol):
    """Where the reports of one gateway go. Called from the engine thread; never blocks."""

    @property
    def backlog_bytes(self) -> int:
        """Bytes taken by `send` that the gateway has not read yet."""

    def send(self, report: ToGateway) -> None:
        """Take a report or news. A sink whose gateway is gone drops it."""


@dataclass(frozen=True, slots=True)
class SnapshotTransfer:
    """How copies of requests travel between workers."""

    outlet: SnapshotOutlet | None = None
    """None sends none: requests that move are computed again."""
    inlet: SnapshotInlet | None = None
    """None fetches none."""
    copy_interval_tokens: int = 0
    """Running requests are copied away after so many new tokens each; 0 never."""


@dataclass(slots=True)
class _Arrival:
    """A submission whose snapshot is on its way."""

    submit: Submit
    arrived_at: float
    matchers: Sequence[Matcher | None] | None
    num_credit: int = 0

    @property
    def deadline(self) -> float | None:
        """When it waits no longer; None never."""
        timeout_s = self.submit.timeout_s
        return None if timeout_s is None else self.arrived_at + timeout_s


class AttentionWorker:
    """Joins an engine with its gateways. Every method but `run` may be called from any thread."""

    def __init__(
        self,
        *,
        worker: WorkerId,
        engine: Engine,
        clock: Clock,
        generation: int = 1,
        snapshots: SnapshotTransfer | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over `engine`; nothing runs before `run`.

        Args:
            worker: Its name.
            engine: Owned by the thread that calls `run`.
            clock: Monotonic seconds.
            generation: Of the membership.
            snapshots: How copies of requests travel; None moves requests without copies.
            after_step: Called on the engine thread when a step has ended well.
        """
        transfer = SnapshotTransfer() if snapshots is None else snapshots
        self.worker = worker
        self._engine = engine
        self._clock = clock
        self._generation = generation
        self._condition = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._is_stopping = False
        self._is_draining = False
        self._is_moving_out = False
        self._is_drained = False
        self._sinks: dict[GatewayId, Sink] = {}
        self._owners: dict[RequestKey, GatewayId] = {}
        self._inlet = transfer.inlet
        self._arriving: dict[RequestKey, _Arrival] = {}
        self._mover = RequestMover(
            engine,
            transfer.outlet,
            post=self._post,
            clock=clock,
            copy_interval_tokens=transfer.copy_interval_tokens,
        )
        self._prefix_epoch = 0
        self._levels = LevelReporter()
        self._grammars = GrammarLine(f"grammars-{worker}", engine.make_matchers)
        self._after_step = after_step
        self._stats = engine.stats()

    @property
    def welcome(self) -> Welcome:
        """First message for a gateway that connects."""
        limits = self._engine.limits
        return Welcome(
            self.worker,
            self._generation,
            limits.max_request_tokens,
            block_tokens=limits.block_tokens,
            is_draining=self._is_draining,
        )

    @property
    def stats(self) -> EngineStats:
        """Engine statistics after the last step or message."""
        return self._stats

    @property
    def is_drained(self) -> bool:
        """Whether `drain` was called, and no request was left after a step since."""
        return self._is_drained

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
        """Refuse new requests and finish the others; see `is_drained`. Idempotent."""
        self._post(self._drain)

    def move_out(self) -> None:
        """Refuse new requests and send the others to other workers; see `is_drained`."""
        self._post(self._move_out)

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
            self._tell_levels()
            self._mover.copy_next()
        self._finish()

    def _finish(self) -> None:
        self._grammars.close()
        with self._condition:
            actions = list(self._inbox)
            self._inbox.clear()
        self._run_actions(actions)
        for key in list(self._arriving):
            self._admit_arrival(key, None)
        self._engine.fail_all(
            ShuttingDownError(
                f"attention worker {self.worker} stops; send the request to another one"
            ),
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
        for key, arrival in list(self._arriving.items()):
            if arrival.deadline is not None and arrival.deadline <= now:
                self._admit_arrival(key, None)
        try:
            outcome = self._engine.step(now, held=self._held_requests())
        except Exception as exc:
            # The worker's outermost loop: the step's requests are lost, the worker is not.
            logger.exception("attention worker %s: a step failed", self.worker)
            error = exc if isinstance(exc, ServingError) else WorkerError(_describe(exc))
            self._engine.fail_running(error, self._clock())
            self._stats = self._engine.stats()
            return True
        self._after_step()
        self._report(outcome)
        return outcome.num_computed_tokens > 0 or outcome.num_preempted > 0

    def _wait(self) -> None:
        deadline, now = self._engine.next_deadline(), self._clock()
        timeouts = [self._levels.due_in_s(self._stats, now) if self._sinks else None]
        deadlines = [deadline, *(one.deadline for one in self._arriving.values())]
        timeouts += [max(0.0, one - now) for one in deadlines if one is not None]
        timeout_s = min((one for one in timeouts if one is not None), default=None)
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
        keys = self._engine.requests.prefixes.keys()
        if keys:
            sink.send(PrefixNews(self._prefix_epoch, list(keys)))
        sink.send(levels_of(self._stats))
        if self._is_draining:
            # It may have begun after the welcome was written.
            sink.send(Draining())

    def _disconnect(self, gateway: GatewayId) -> None:
        self._sinks.pop(gateway, None)
        for key in [key for key, owner in self._owners.items() if owner == gateway]:
            del self._owners[key]
            self._arriving.pop(key, None)
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
                    self._admit_arrival(key, None)
                    self._engine.cancel(key, self._clock())
            case Credit():
                key = RequestKey(message.request_id, message.attempt)
                if self._owners.get(key) == gateway:
                    self._credit(key, message.num_tokens)
            case FlushCache():
                num_flushed = self._engine.flush_prefixes()
                self._sinks[gateway].send(CacheFlushed(message.flush_id, num_flushed))

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
        arrival = _Arrival(submit, arrived_at, None if made is None else made.result())
        place, inlet = submit.snapshot, self._inlet
        if place is not None and inlet is not None:
            self._arriving[keys[0]] = arrival

            def on_loaded(loaded: RequestSnapshot | ServingError) -> None:
                self._post(lambda: self._admit_arrival(keys[0], loaded, arrival))

            if inlet.try_load(place, on_loaded):
                return
            del self._arriving[keys[0]]
        self._take(arrival, None)

    def _take(self, arrival: _Arrival, snapshot: RequestSnapshot | None) -> None:
        submit = arrival.submit
        try:
            self._engine.submit(
                submit, arrival.arrived_at, matchers=arrival.matchers, snapshot=snapshot
            )
        except InvalidRequestError as exc:
            for one in split_choices(submit):
                self._owners.pop(RequestKey(one.request_id, one.attempt), None)
            logger.warning("worker %s: %s", self.worker, exc.message)

    def _admit_arrival(
        self,
        key: RequestKey,
        loaded: RequestSnapshot | ServingError | None,
        expected: _Arrival | None = None,
    ) -> None:
        """Submit a request that waits for its snapshot; nothing happens if it does not any more."""
        arrival = self._arriving.get(key)
        if arrival is None or (expected is not None and arrival is not expected):
            return
        del self._arriving[key]
        if isinstance(loaded, ServingError):
            logger.warning("request %s: %s; it is computed again", key.request_id, loaded.message)
            self._engine.requests.counters.num_refused_snapshots += 1
        self._take(arrival, loaded if isinstance(loaded, RequestSnapshot) else None)
        self._engine.credit(key, arrival.num_credit)
        if self._is_moving_out:
            self._mover.move_all()

    def _credit(self, key: RequestKey, num_tokens: int) -> None:
        arrival = self._arriving.get(key)
        if arrival is None:
            self._engine.credit(key, num_tokens)
        else:
            arrival.num_credit += max(num_tokens, 0)

    def _drain(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self._broadcast(Draining())

    def _move_out(self) -> None:
        self._drain()
        self._is_moving_out = True
        for key in list(self._arriving):
            self._admit_arrival(key, None)
        self._mover.move_all()

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
        self._is_drained = self._is_draining and not (self._engine.num_live or self._arriving)
        reports = split_outcome(outcome, self._mover.take_saved(), self._owners)
        for gateway, report in reports.items():
            self._send(gateway, report)
        news = self._engine.requests.prefixes.take_news()
        if news is not None:
            self._prefix_epoch += 1
            self._broadcast(PrefixNews(self._prefix_epoch, list(news.added), list(news.removed)))

    def _tell_levels(self) -> None:
        levels = self._levels.take(self._stats, self._clock()) if self._sinks else None
        if levels is not None:
            self._broadcast(levels)

    def _broadcast(self, message: ToGateway) -> None:
        for gateway in list(self._sinks):
            self._send(gateway, message)

    def _send(self, gateway: GatewayId, message: ToGateway) -> None:
        sink = self._sinks.get(gateway)
        if sink is None:
            return
        try:
            sink.send(message)
        except Exception:
            # The worker's outermost loop: a broken sink loses its gateway only.
            logger.exception("attention worker %s: the sink of %s failed", self.worker, gateway)
            self._disconnect(gateway)


def _failure_of(made: Made) -> ServingError | None:
    """Why no matchers were made, or None."""
    if made.cancelled():
        return ShuttingDownError("the attention worker stops; send the request to another one")
    exc = made.exception()
    if exc is None or isinstance(exc, ServingError):
        return exc
    logger.error("a grammar failed", exc_info=exc)
    return WorkerError(f"the grammar failed with {type(exc).__name__}: {exc}")


def _describe(exc: BaseException) -> str:
    return f"a step failed with {type(exc).__name__}: {exc}; the request can be tried again"
