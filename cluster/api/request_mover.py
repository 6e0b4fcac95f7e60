"""Takes requests that left their worker to another one, or lets them wait for one for a while.

A request that drained away, or whose worker was lost, goes on elsewhere as its next attempt, with
the tokens so far: its reader notices nothing but the pause. Where no worker is there it waits,
within the client's deadline. Two bounds keep one request from harming the others: how many workers
may be lost under it, and that each worker which refuses it is asked once.

Belongs to one event loop; no method waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from actors.request_channel import SnapshotPlace
from cluster.api.prefix_map import PrefixMap
from cluster.api.request_outcome import Departure, LeaveReason
from cluster.api.request_stream import RequestStream
from cluster.api.worker_choice import WorkerLoad, choose_worker
from cluster.api.worker_connection import WorkerConnection
from configs.errors import NoWorkerError, OverloadedError, RequestTooLargeError, WorkerError
from configs.ids import WorkerId

MAX_LOST_WORKERS: Final = 4
"""Workers that may be lost under one request before it fails: it may be what crashes them."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Move:
    """A request that has left a worker at least once."""

    stream: RequestStream
    last: Departure
    """Why it left the last worker that ran it."""
    num_lost: int = 0
    refused_by: set[WorkerId] = field(default_factory=set)
    """Since `last`."""
    is_counted: bool = False
    """Whether it has gone on since `last`."""
    give_up_at: float | None = None
    """When it stops to look, by the loop's clock; set when it first waits since `last`."""
    timer: asyncio.TimerHandle | None = None
    """Set while it waits for a worker."""

    def stop_waiting(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class RequestMover:
    """Moves the requests of one gateway.

    Args:
        connections: By worker.
        prefixes: What their caches hold.
        timeout_s: How long a request may wait for a worker; 0 lets it fail at once.
        on_moved: Called when a request has gone to another worker, with why it left the last one.
    """

    def __init__(
        self,
        connections: Mapping[WorkerId, WorkerConnection],
        prefixes: PrefixMap,
        *,
        timeout_s: float,
        on_moved: Callable[[LeaveReason], None],
    ) -> None:
        self._connections = connections
        self._prefixes = prefixes
        self._timeout_s = timeout_s
        self._on_moved = on_moved
        self._moves: dict[RequestStream, _Move] = {}
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a worker."""
        return sum(move.timer is not None for move in self._moves.values())

    def take(self, stream: RequestStream, departure: Departure) -> None:
        """Take over a request that left its worker; nothing happens if it has ended."""
        if self._is_closed or not stream.needs_worker:
            stream.fail(departure.error)
            return
        stream.detach(departure.usage)
        move = self._moves.get(stream)
        if move is None:
            move = self._moves[stream] = _Move(stream, departure)
        self._note(move, departure)
        if move.num_lost > MAX_LOST_WORKERS:
            stream.fail(_too_many_lost(move))
        elif not self._send(move):
            if isinstance(departure.error, OverloadedError):
                # All that are there are full, which passes less soon than a worker comes.
                stream.fail(departure.error)
            else:
                self._wait(move)

    def retry(self) -> None:
        """Look again for a worker for every request that waits; call when one may be there."""
        for move in tuple(self._moves.values()):
            if move.timer is not None and self._send(move):
                move.stop_waiting()

    def forget(self, stream: RequestStream) -> None:
        """Let go of a request whose reader has left."""
        move = self._moves.pop(stream, None)
        if move is not None:
            move.stop_waiting()

    def close(self) -> None:
        """Move nothing from now on: requests that have no worker fail. Idempotent."""
        self._is_closed = True
        for move in tuple(self._moves.values()):
            if move.timer is not None:
                move.stop_waiting()
                move.stream.fail(move.last.error)

    def _note(self, move: _Move, departure: Departure) -> None:
        if departure.reason is LeaveReason.REFUSED:
            move.refused_by.add(departure.worker)
            return
        move.last = departure
        move.is_counted = False
        move.give_up_at = None
        move.refused_by.clear()
        # A worker that gives requests up without draining could do so for ever.
        is_odd = self._connections[departure.worker].is_usable
        if departure.reason is LeaveReason.LOST or is_odd:
            move.num_lost += 1

    def _send(self, move: _Move) -> bool:
        """Begin the next attempt; False if there is no worker for it."""
        stream = move.stream
        if stream.time_left_s == 0:
            stream.expire()
            return True
        worker = self._find_worker(move)
        if worker is None:
            return False
        link = self._connections[worker]
        submit = stream.attach(link.post, takes_snapshot=self._may_be_there(stream.snapshot))
        link.submit(submit, [stream])
        _log.info(
            "request %s: attempt %d on attention worker %s with %d tokens (%s)",
            submit.request_id,
            submit.attempt,
            worker,
            len(submit.generated_ids),
            move.last.error.message,
        )
        if not move.is_counted and move.last.reason is not LeaveReason.REFUSED:
            move.is_counted = True
            self._on_moved(move.last.reason)
        return True

    def _find_worker(self, move: _Move) -> WorkerId | None:
        """Return where the snapshot is, else the usual choice; the last worker only if alone."""
        stream = move.stream
        links = self._connections
        # One that refused and came back is another one.
        move.refused_by = {name for name in move.refused_by if links[name].welcome is not None}
        known = list_loads(links, self._prefixes, stream.token_ids)
        loads = [load for load in known if load.worker not in move.refused_by]
        others = [load for load in loads if load.worker != move.last.worker]
        place = stream.snapshot
        near = [load for load in others if place is not None and load.worker == place.worker]
        for candidates in (near, others, loads):
            try:
                return choose_worker(candidates, stream.num_tokens)
            except (NoWorkerError, RequestTooLargeError):
                continue
        return None

    def _may_be_there(self, place: SnapshotPlace | None) -> bool:
        """Whether a snapshot is worth asking for: what lay in a lost worker's memory is gone."""
        link = None if place is None else self._connections.get(place.worker)
        return link is None or link.welcome is not None

    def _wait(self, move: _Move) -> None:
        if self._timeout_s <= 0:
            move.stream.fail(move.last.error)
            return
        loop = asyncio.get_running_loop()
        if move.give_up_at is None:
            move.give_up_at = loop.time() + self._timeout_s
        left_s = move.stream.time_left_s
        is_late = left_s is not None and loop.time() + left_s <= move.give_up_at
        due_at = loop.time() + left_s if left_s is not None and is_late else move.give_up_at
        move.timer = loop.call_at(due_at, partial(self._give_up, move, is_late=is_late))

    def _give_up(self, move: _Move, *, is_late: bool) -> None:
        move.timer = None
        if is_late:
            move.stream.expire()
            return
        move.stream.fail(
            WorkerError(
                f"{move.last.error.message}; no other attention worker could take it within "
                f"{self._timeout_s:g} s (api.move_timeout_s)"
            )
        )


def list_loads(
    connections: Mapping[WorkerId, WorkerConnection],
    prefixes: PrefixMap,
    token_ids: Sequence[int],
) -> list[WorkerLoad]:
    """Return the connected workers as the choice of one for a prompt looks at them."""
    linked = [
        (worker, link, link.welcome)
        for worker, link in connections.items()
        if link.welcome is not None
    ]
    # With one worker there is nothing to choose.
    prefix_tokens = prefixes.longest(token_ids) if len(linked) > 1 else {}
    return [
        WorkerLoad(
            worker,
            link.num_open,
            welcome.max_request_tokens,
            is_draining=not link.is_usable,
            prefix_tokens=prefix_tokens.get(worker, 0),
        )
        for worker, link, welcome in linked
    ]


def _too_many_lost(move: _Move) -> WorkerError:
    return WorkerError(
        f"request {move.stream.key.request_id}: {move.num_lost} attention workers were lost while "
        f"they ran it (limit {MAX_LOST_WORKERS}); it may be what ends them: retry once. Last: "
        f"{move.last.error.message}"
    )
