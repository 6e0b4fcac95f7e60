"""An expert worker: takes dispatch frames of any number of attention workers and answers them.

A plain class, run by one thread. All frames that wait for a layer become one grouped FFN, so that
one reading of an expert's weights serves every attention worker. A bad frame is answered with a
failure and disturbs nobody; a broken link is dropped.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.expert_answers import AnswerMaker, make_failure
from actors.expert_merge import (
    Dispatch,
    PairBatch,
    merge_dispatches,
    parse_dispatch,
)
from actors.merge_queue import MergeQueue
from configs.errors import FrameError, RoutingError, ServingError, TransportError, WorkerError
from configs.ids import Epoch, Generation, WorkerId
from configs.numerics import FloatType
from router.frames import HEADER_BYTES, FrameHeader
from router.membership import ExpertWorkerInfo
from router.transport.base import Bytes, Frame, Link, Listener
from router.transport.connect import TransportKind, host_token, listen
from router.transport.wait import Waiter

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""An idle `serve` looks at its stop event this often."""
MAX_UNSENT_BYTES = 64 << 20
"""A peer that lets more than this wait is not read from until it has caught up."""


_Kind = tuple[int, FloatType]
"""Layer and wire dtype: frames that are computed together."""


class ExpertCompute(Protocol):
    """What computes pairs; `ExpertStore` is one."""

    @property
    def latent_size(self) -> int:
        """Values of a latent."""

    def check(self, layer: int, epoch: Epoch, experts_P: NDArray[np.uint32]) -> None:
        """Raise `PlacementError` unless the pairs can be computed here."""

    def run(self, batch: PairBatch) -> tuple[Tensor, int]:
        """Return pair answers `[P, L]` on the CPU, and the experts whose weights were read."""


@dataclass(frozen=True, slots=True)
class ExpertWorkerSettings:
    """Settings of one expert worker."""

    merge_window_s: float = 0.0
    """How long a frame may wait for frames of the same layer, seconds; 0 merges what is there."""
    spin_s: float = 0.0002
    """An idle worker polls this long before it sleeps in the kernel, seconds."""
    send_timeout_s: float = 30.0
    """A peer that does not take its answers for this long is dropped, seconds."""


@dataclass(frozen=True, slots=True)
class ExpertWorkerStats:
    """What a worker has done since it was made. Only grows, but `num_peers`."""

    num_peers: int
    """Attention workers connected now."""
    frames: int
    """Dispatch frames answered, failures included."""
    failures: int
    """Of these, answered with a failure."""
    merged_ffns: int
    """Grouped FFNs run: one per layer and merge."""
    pairs: int
    """(token, expert) pairs computed."""
    expert_weight_reads: int
    """Experts whose weights were read, summed over the FFNs."""
    bytes_in: int
    bytes_out: int
    """Frames, headers included."""
    busy_s: float
    """Time spent parsing, computing and answering."""

    @property
    def pairs_per_expert_weight_read(self) -> float:
        """How many tokens one reading of an expert's weights served; 0 before the first."""
        return self.pairs / self.expert_weight_reads if self.expert_weight_reads else 0.0


class _Peer:
    """One attention worker's link."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.descriptor = link.fileno()
        self.generation: Generation = link.generation
        self.is_open = True


class _Waiting(msgspec.Struct, frozen=True):
    """A dispatch in the queue."""

    peer: _Peer
    frame: Frame
    dispatch: Dispatch


class ExpertWorker:
    """Serves dispatches. One thread calls `listen`, `step` or `serve`, and `close`."""

    def __init__(
        self, *, worker: WorkerId, compute: ExpertCompute, settings: ExpertWorkerSettings
    ) -> None:
        """Start without listeners.

        Args:
            worker: Own name.
            compute: Computes the pairs.
            settings: Fixed for the worker's life.
        """
        self._worker = worker
        self._compute = compute
        self._settings = settings
        self._waiter = Waiter(spin_s=settings.spin_s)
        self._listeners: dict[int, Listener] = {}
        self._peers: dict[int, _Peer] = {}
        self._slow: set[int] = set()
        self._queue: MergeQueue[tuple[int, FloatType], _Waiting] = MergeQueue(
            window_s=settings.merge_window_s
        )
        self._answers = AnswerMaker(latent_size=compute.latent_size)
        self._frames = 0
        self._failures = 0
        self._merged_ffns = 0
        self._pairs = 0
        self._expert_weight_reads = 0
        self._bytes_in = 0
        self._bytes_out = 0
        self._busy_s = 0.0

    @property
    def stats(self) -> ExpertWorkerStats:
        """Snapshot of the counters; may be read from other threads."""
        return ExpertWorkerStats(
            num_peers=len(self._peers),
            frames=self._frames,
            failures=self._failures,
            merged_ffns=self._merged_ffns,
            pairs=self._pairs,
            expert_weight_reads=self._expert_weight_reads,
            bytes_in=self._bytes_in,
            bytes_out=self._bytes_out,
            busy_s=self._busy_s,
        )

    def listen(
        self, *, directory: Path, host: str, transports: Sequence[TransportKind]
    ) -> ExpertWorkerInfo:
        """Open listeners and return how this worker is reached.

        Args:
            directory: Folder for sockets; made if it is missing.
            host: Address that TCP binds, and that peers connect to.
            transports: Kinds to open.

        Raises:
            TransportError: A listener cannot be opened; those that were stay until `close`.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for kind in transports:
            listener = listen(kind, worker=self._worker, directory=directory, host=host)
            self._listeners[listener.fileno()] = listener
            self._waiter.add(listener.fileno())
        return ExpertWorkerInfo(
            worker=self._worker,
            addresses=tuple(listener.address for listener in self._listeners.values()),
            host_token=host_token(directory),
        )

    def serve(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, seen within `IDLE_WAIT_S` when idle. Does not close."""
        while not stop.is_set():
            self.step(wait_s=IDLE_WAIT_S)

    def step(self, *, wait_s: float = 0.0) -> bool:
        """Take in what has arrived and serve at most one layer; return whether anything was done.

        Args:
            wait_s: How long to wait for something to do.
        """
        due = self._queue.next_due()
        deadline = 0.0 if wait_s <= 0 else time.monotonic() + wait_s
        ready = self._waiter.wait(deadline if due is None else min(due, deadline))
        for descriptor, events in ready:
            listener = self._listeners.get(descriptor)
            if listener is not None:
                self._accept(listener)
                continue
            peer = self._peers.get(descriptor)
            if peer is not None:
                self._serve_peer(peer, events)
        if self._slow:
            self._push_slow()
        waiting = self._queue.pop_due(now=time.monotonic())
        if waiting is not None:
            self._answer(waiting)
        return bool(ready) or waiting is not None

    def close(self) -> None:
        """End all links and listeners and remove their files. Idempotent."""
        for listener in self._listeners.values():
            self._waiter.remove(listener.fileno())
            listener.close()
        self._listeners.clear()
        for peer in list(self._peers.values()):
            self._drop(peer, "the worker closes")

    def _accept(self, listener: Listener) -> None:
        while (link := listener.try_accept()) is not None:
            peer = _Peer(link)
            self._peers[peer.descriptor] = peer
            self._waiter.add(peer.descriptor)
            log.debug("%s: %s connected", self._worker, link.peer)

    def _serve_peer(self, peer: _Peer, events: int) -> None:
        try:
            if events & select.POLLOUT:
                self._flush(peer)
            if events & ~select.POLLOUT:
                frame = peer.link.try_receive()
                if frame is not None:
                    self._take_frame(peer, frame)
        except (TransportError, FrameError) as exc:
            self._drop(peer, exc.message)

    def _take_frame(self, peer: _Peer, frame: Frame) -> None:
        started = time.monotonic()
        header = frame.header
        self._bytes_in += HEADER_BYTES + header.payload_bytes
        try:
            dispatch = self._check(peer, frame)
        except ServingError as exc:
            self._fail(peer, frame, exc)
            return
        kind = (header.layer, header.wire_dtype)
        self._queue.push(kind, _Waiting(peer, frame, dispatch), now=started)
        self._busy_s += time.monotonic() - started

    def _check(self, peer: _Peer, frame: Frame) -> Dispatch:
        header = frame.header
        if header.generation < peer.generation:
            raise RoutingError(
                f"{self._worker} is in generation {peer.generation} with {peer.link.peer}, the "
                f"frame is of generation {header.generation}"
            )
        peer.generation = header.generation
        if header.latent_size != self._compute.latent_size:
            raise FrameError(
                f"{self._worker} computes latents of {self._compute.latent_size} values, "
                f"the frame has {header.latent_size}"
            )
        dispatch = parse_dispatch(frame)
        self._compute.check(header.layer, header.epoch, dispatch.experts)
        return dispatch

    def _answer(self, waiting: list[_Waiting]) -> None:
        """Compute the frames of one layer together and answer each."""
        started = time.monotonic()
        waiting = [item for item in waiting if item.peer.is_open]
        if not waiting:
            return
        batch = merge_dispatches([item.dispatch for item in waiting])
        try:
            y_PL, num_reads = self._compute.run(batch)
        except (ServingError, RuntimeError, MemoryError) as exc:
            # A failed computation concerns the frames in it; the worker and its other peers go on.
            log.exception("%s: layer %d failed", self._worker, batch.layer)
            for item in waiting:
                self._fail(item.peer, item.frame, exc)
            return
        self._merged_ffns += 1
        self._pairs += batch.experts_P.size
        self._expert_weight_reads += num_reads
        start = 0
        for item in waiting:
            stop = start + item.dispatch.header.num_pairs
            answers = y_PL if len(waiting) == 1 else y_PL[start:stop]
            header, payload = self._answers.make_answer(item.dispatch, answers)
            self._reply(item.peer, item.frame, header, payload)
            start = stop
        self._busy_s += time.monotonic() - started

    def _fail(self, peer: _Peer, frame: Frame, error: Exception) -> None:
        code = error.code if isinstance(error, ServingError) else WorkerError.code
        log.warning("%s: a frame of %s failed: %s", self._worker, peer.link.peer, error)
        self._failures += 1
        header, payload = make_failure(frame.header, f"{code}: {error}")
        self._reply(peer, frame, header, payload)

    def _reply(self, peer: _Peer, frame: Frame, header: FrameHeader, payload: Bytes) -> None:
        """Release a frame and send its answer; never raises."""
        self._frames += 1
        link = peer.link
        link.release(frame)
        if not peer.is_open:
            return
        try:
            link.send(header, (payload,), deadline=time.monotonic() + self._settings.send_timeout_s)
        except (TransportError, FrameError) as exc:
            self._drop(peer, exc.message)
            return
        self._bytes_out += HEADER_BYTES + header.payload_bytes
        if link.unsent_bytes:
            self._watch(peer)

    def _flush(self, peer: _Peer) -> None:
        peer.link.flush()
        self._watch(peer)

    def _watch(self, peer: _Peer) -> None:
        """Watch for what the state of a peer's queue asks for."""
        unsent = peer.link.unsent_bytes
        self._waiter.watch(
            peer.descriptor, for_reading=unsent <= MAX_UNSENT_BYTES, for_writing=unsent > 0
        )
        if unsent:
            self._slow.add(peer.descriptor)
        else:
            self._slow.discard(peer.descriptor)

    def _push_slow(self) -> None:
        """Give slow peers a push; those past their deadline are dropped."""
        for descriptor in list(self._slow):
            peer = self._peers[descriptor]
            try:
                self._flush(peer)
            except TransportError as exc:
                self._drop(peer, exc.message)

    def _drop(self, peer: _Peer, reason: str) -> None:
        if not peer.is_open:
            return
        peer.is_open = False
        self._waiter.remove(peer.descriptor)
        del self._peers[peer.descriptor]
        self._slow.discard(peer.descriptor)
        peer.link.close()
        log.debug("%s: dropped %s: %s", self._worker, peer.link.peer, reason)
