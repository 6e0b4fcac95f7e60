"""The links of one attention worker to its expert workers, and waiting on all of them."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, KeysView, Sequence

from configs.errors import FrameError, TransportError, WorkerError
from configs.ids import Generation, WorkerId
from router.frames import FrameHeader
from router.membership import ExpertWorkerInfo, Membership
from router.settings import RouterSettings
from router.transport.base import Bytes, Frame, Hello, Link
from router.transport.connect import connect_worker
from router.transport.wait import Waiter

log = logging.getLogger(__name__)

OnFrame = Callable[[Link, Frame], None]
"""Takes a frame; whoever takes it releases it."""
OnLost = Callable[[WorkerId, str], None]
"""Told that a worker's link is gone, and why."""


class WorkerLinks:
    """One link per expert worker. Owned by one thread.

    A link that fails is dropped at once and reported once; `connect` makes a new one.
    """

    def __init__(
        self, *, worker: WorkerId, settings: RouterSettings, on_frame: OnFrame, on_lost: OnLost
    ) -> None:
        """Start without links."""
        self._worker = worker
        self._settings = settings
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._links: dict[WorkerId, Link] = {}
        self._by_descriptor: dict[int, Link] = {}
        self._waiter = Waiter(spin_s=settings.spin_s)

    @property
    def workers(self) -> KeysView[WorkerId]:
        """Workers that are connected."""
        return self._links.keys()

    def connect(self, membership: Membership) -> None:
        """Keep the links of members, drop all others, make the missing ones.

        Raises:
            TransportError: A member cannot be reached; links that were made stay.
            FrameError: Something else answers at its address.
        """
        members = {info.worker for info in membership.expert_workers}
        for worker in [worker for worker in self._links if worker not in members]:
            self.drop(worker, "left the membership")
        self._drop_closed()
        deadline = time.monotonic() + self._settings.connect_timeout_s
        for info in membership.expert_workers:
            if info.worker not in self._links:
                self._dial(info, membership.generation, deadline)

    def send(
        self, worker: WorkerId, header: FrameHeader, parts: Sequence[Bytes], *, deadline: float
    ) -> None:
        """Send or queue a frame.

        Raises:
            WorkerError: The worker is not connected, or its link broke.
        """
        link = self._links.get(worker)
        if link is None:
            raise WorkerError(
                f"{worker} is not connected; layer {header.layer}, step {header.step} needs it"
            )
        try:
            link.send(header, parts, deadline=deadline)
        except TransportError as exc:
            self.drop(worker, exc.message)
            raise WorkerError(
                f"{worker} is gone at layer {header.layer}, step {header.step}: {exc.message}"
            ) from exc
        if link.unsent_bytes:
            self._waiter.watch(link.fileno(), for_reading=True, for_writing=True)

    def receive(self, deadline: float) -> bool:
        """Wait until something comes, and hand out what did; return whether anything did."""
        ready = self._waiter.wait(deadline)
        for descriptor, events in ready:
            link = self._by_descriptor.get(descriptor)
            if link is not None:
                self._serve(link, events)
        return bool(ready)

    def drop(self, worker: WorkerId, reason: str) -> None:
        """Close a link and report it."""
        link = self._links.pop(worker)
        descriptor = link.fileno()
        if descriptor < 0:
            descriptor = next(d for d, known in self._by_descriptor.items() if known is link)
        self._waiter.remove(descriptor)
        del self._by_descriptor[descriptor]
        link.close()
        self._on_lost(worker, reason)

    def close(self) -> None:
        """Close all links without reports. Idempotent."""
        for descriptor, link in self._by_descriptor.items():
            self._waiter.remove(descriptor)
            link.close()
        self._links.clear()
        self._by_descriptor.clear()

    def _serve(self, link: Link, events: int) -> None:
        try:
            if events & select.POLLOUT and link.flush():
                self._waiter.watch(link.fileno(), for_reading=True, for_writing=False)
            if events & ~select.POLLOUT:
                frame = link.try_receive()
                if frame is not None:
                    self._on_frame(link, frame)
        except (TransportError, FrameError) as exc:
            if self._links.get(link.peer) is link:
                self.drop(link.peer, exc.message)

    def _drop_closed(self) -> None:
        """Find out about links whose peer died while nobody looked."""
        while self.receive(deadline=0.0):
            pass

    def _dial(self, info: ExpertWorkerInfo, generation: Generation, deadline: float) -> None:
        link = connect_worker(
            info,
            Hello(worker=self._worker, generation=generation),
            choice=self._settings.transport,
            deadline=deadline,
            shm_bytes=self._settings.shm_bytes,
        )
        self._links[info.worker] = link
        self._by_descriptor[link.fileno()] = link
        self._waiter.add(link.fileno())
        log.debug("%s connected to %s", self._worker, info.worker)
