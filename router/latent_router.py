"""The router: sends latents to expert workers and brings back their weighted sums.

Owned by one thread of an attention worker. Any number of dispatches may be in flight (lanes), and
answers may come in any order; those of calls that were given up are ignored. Membership (links) and
placement (which worker holds which expert) change independently, between steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from configs.errors import (
    FrameError,
    PlacementError,
    RoutingError,
    TransportTimeoutError,
    WorkerError,
)
from configs.ids import Generation, WorkerId
from configs.numerics import Combine
from router.combine import LatentSum
from router.dispatch_plan import WorkerPart
from router.frames import HEADER_BYTES, PAIR_BYTES, FrameHeader, FrameKind
from router.membership import Membership
from router.pairs import EXPERT, NO_ORDER, list_pairs, rank_pairs
from router.pick_observer import PickObserver
from router.placement import LayerPlacement, Placement
from router.plan import plan_dispatch
from router.routes import LayerRoutes, index_placement
from router.settings import RouterCounters, RouterSettings
from router.staging import StagingRows
from router.ticket import Call, DispatchTicket, RouterTicket
from router.transport.base import Bytes, Frame, Link
from router.worker_links import WorkerLinks

_MAX_ATTEMPT = (1 << 16) - 1


class LatentRouter:
    """Dispatch and combine for one attention worker. Not thread-safe."""

    def __init__(
        self,
        *,
        worker: WorkerId,
        settings: RouterSettings,
        observer: PickObserver | None = None,
    ) -> None:
        """Start without workers; call `connect`, then `set_placement`.

        Args:
            worker: Own name, as expert workers see it.
            settings: Fixed for the router's life.
            observer: Told of all picks.
        """
        self._settings = settings
        self._observer = observer
        self._links = WorkerLinks(
            worker=worker, settings=settings, on_frame=self._take_frame, on_lost=self._lose_worker
        )
        self._generation = Generation(0)
        self._placement: dict[int, LayerPlacement] = {}
        self._routes: dict[int, LayerRoutes] = {}
        self._tickets: dict[Call, RouterTicket] = {}
        self._attempt = 0
        self._row_bytes = settings.latent_size * settings.wire_dtype.num_bytes
        self._staging = StagingRows(row_size=settings.latent_size, wire_dtype=settings.wire_dtype)
        self._sum = LatentSum(latent_size=settings.latent_size, wire_dtype=settings.wire_dtype)
        self._frames_out = 0
        self._tokens_out = 0
        self._pairs_out = 0
        self._bytes_in = 0
        self._frames_in = 0
        self._late_frames_in = 0

    @property
    def counters(self) -> RouterCounters:
        """Snapshot of what was sent and received."""
        return RouterCounters(
            frames_out=self._frames_out,
            tokens_out=self._tokens_out,
            pairs_out=self._pairs_out,
            latent_bytes_out=self._tokens_out * self._row_bytes,
            pair_bytes_out=self._pairs_out * PAIR_BYTES,
            header_bytes_out=self._frames_out * HEADER_BYTES,
            bytes_in=self._bytes_in,
            frames_in=self._frames_in,
            late_frames_in=self._late_frames_in,
        )

    @property
    def connected_workers(self) -> tuple[WorkerId, ...]:
        """Expert workers with a live link, ascending."""
        return tuple(sorted(self._links.workers))

    def connect(self, membership: Membership) -> None:
        """Make links to new workers, keep existing ones, drop removed ones.

        A link that broke is made anew. Call between steps. After an error the links that were made
        stay, and the call may be repeated.

        Raises:
            RoutingError: The membership is older than the current one.
            TransportError: A worker cannot be reached.
        """
        if membership.generation < self._generation:
            raise RoutingError(
                f"membership generation {membership.generation} is older than {self._generation}"
            )
        self._generation = membership.generation
        try:
            self._links.connect(membership)
        finally:
            self._routes.clear()

    def set_placement(self, placement: Placement) -> None:
        """Use `placement` for dispatches that begin from now on. Call between steps.

        Copies on workers that are not connected are not used.
        """
        self._placement = {placed.layer: placed for placed in placement.layers}
        self._routes.clear()

    def lane(self, *, step: int, lane: int) -> RouterLane:
        """Return the dispatcher of one lane (micro-batch) of a step."""
        return RouterLane(self, step=step, lane=lane)

    def wait_any(self, tickets: Sequence[DispatchTicket], *, deadline: float) -> None:
        """Return when at least one ticket is ready.

        A ticket that failed is ready: its `finish` raises.

        Args:
            tickets: At least one, of this router.
            deadline: `time.monotonic()` seconds; a ticket's own deadline holds too.

        Raises:
            TransportTimeoutError: A deadline passed; names the workers, layer and step.
        """
        own = [_own_ticket(ticket) for ticket in tickets]
        first = min(own, key=lambda ticket: ticket.deadline)
        limit = min(deadline, first.deadline)
        while not any(ticket.is_settled for ticket in own):
            self._receive_until(limit, first)

    def abandon_step(self) -> None:
        """Forget all dispatches in flight; their late answers are ignored.

        Later dispatches carry a new attempt number, so the same step may be run again.
        """
        for ticket in self._tickets.values():
            ticket.close()
        self._tickets.clear()
        if self._observer is not None:
            self._observer.forget_step()
        self._attempt = (self._attempt + 1) % _MAX_ATTEMPT

    def close(self) -> None:
        """End all links. Idempotent."""
        self.abandon_step()
        self._links.close()

    def begin(
        self,
        layer: int,
        z_TL: Tensor,
        expert_ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        step: int,
        lane: int,
    ) -> RouterTicket:
        """Start a dispatch; see `Dispatcher.begin`. Lanes call this.

        Raises:
            PlacementError: The layer has no placement.
            RoutingError: The choices cannot be dispatched, or the call is already in flight.
            WorkerError: A worker that is needed is gone.
        """
        routes = self._layer_routes(layer)
        call = (self._generation, step, layer, lane, self._attempt)
        if call in self._tickets:
            raise RoutingError(f"layer {layer} of step {step}, lane {lane} is already in flight")
        latents = self._wire_rows(z_TL)
        if z_TL.is_cuda:
            expert_ids_TK, weights_TK = expert_ids_TK.cpu(), weights_TK.cpu()
        pairs = list_pairs(expert_ids_TK.numpy(), weights_TK.numpy(), layer=layer)
        num_tokens = expert_ids_TK.shape[0]
        if num_tokens != latents.shape[0]:
            raise RoutingError(
                f"layer {layer}: {latents.shape[0]} latents but choices for {num_tokens}"
            )
        is_canonical = self._settings.combine is Combine.CANONICAL
        if not is_canonical:
            # Expert workers add the pairs of a token in the order they come.
            pairs = pairs.take(rank_pairs(pairs, num_tokens, routes).positions_P, axis=1)
        plan = plan_dispatch(pairs, num_tokens, routes)
        deadline = time.monotonic() + self._settings.dispatch_timeout_s
        for part in plan.parts:
            self._send_part(call, routes, part, latents, deadline)
        # The rest is not needed before the answers: it is done while the expert workers compute.
        # After an error here those answers find no ticket and are ignored.
        order = rank_pairs(pairs, num_tokens, routes) if is_canonical else NO_ORDER
        if self._observer is not None:
            self._observer.count(layer, pairs[EXPERT])
        ticket = RouterTicket(
            call=call,
            plan=plan,
            order=order,
            routes=routes,
            settings=self._settings,
            poll=self._poll,
            deadline=deadline,
            device=z_TL.device if z_TL.is_cuda else None,
        )
        self._tickets[call] = ticket
        return ticket

    def finish(self, ticket: DispatchTicket) -> Tensor:
        """Wait for a dispatch and return the sums; see `Dispatcher.finish`. Lanes call this."""
        own = _own_ticket(ticket)
        if self._tickets.get(own.call) is not own:
            raise RoutingError(
                f"layer {own.layer} of step {own.step} was finished or given up before"
            )
        try:
            self._await(own)
            if own.error is not None:
                raise own.error
            return self._combine(own)
        finally:
            self._forget(own)

    def _await(self, ticket: RouterTicket) -> None:
        while not ticket.is_settled:
            self._receive_until(ticket.deadline, ticket)

    def _receive_until(self, deadline: float, ticket: RouterTicket) -> None:
        """Take in what comes next; a passed deadline is an error about `ticket`."""
        if not self._links.receive(deadline) and time.monotonic() >= deadline:
            raise TransportTimeoutError(
                f"no answer from {', '.join(ticket.waiting_for)} for layer {ticket.layer}, "
                f"step {ticket.step} before the deadline "
                f"(router.dispatch_timeout_s is {self._settings.dispatch_timeout_s} s)"
            )

    def _combine(self, ticket: RouterTicket) -> Tensor:
        plan = ticket.plan
        if self._settings.combine is Combine.CANONICAL:
            sums_TL = self._sum.add_pairs(
                ticket.pair_answers(),
                order=ticket.order,
                num_tokens=plan.num_tokens,
            )
        else:
            sums_TL = self._sum.add_partial_sums(ticket.partial_sums(), num_tokens=plan.num_tokens)
        return sums_TL if ticket.device is None else sums_TL.to(ticket.device)

    def _wire_rows(self, z_TL: Tensor) -> Bytes:
        """Return latents as bytes in wire dtype, one row per token, valid until the next call."""
        if z_TL.ndim != 2 or z_TL.shape[1] != self._settings.latent_size:
            raise RoutingError(
                f"latents have shape {tuple(z_TL.shape)}, "
                f"expected [tokens, {self._settings.latent_size}]"
            )
        return self._staging.stage(z_TL)

    def _send_part(
        self,
        call: Call,
        routes: LayerRoutes,
        part: WorkerPart,
        latents: Bytes,
        deadline: float,
    ) -> None:
        settings = self._settings
        generation, step, layer, lane, attempt = call
        num_pairs = part.num_pairs
        header = FrameHeader(
            kind=FrameKind.DISPATCH,
            generation=Generation(generation),
            epoch=routes.epoch,
            step=step,
            layer=layer,
            lane=lane,
            attempt=attempt,
            num_tokens=part.num_rows,
            num_pairs=num_pairs,
            latent_size=settings.latent_size,
            wire_dtype=settings.wire_dtype,
            combine=settings.combine,
            payload_bytes=part.num_rows * self._row_bytes + num_pairs * PAIR_BYTES,
        )
        rows = latents if part.rows_N is None else latents.take(part.rows_N, axis=0)
        payload = (rows.reshape(-1), part.pairs_3Q.reshape(-1).view("u1"))
        self._links.send(routes.workers[part.worker], header, payload, deadline=deadline)
        self._frames_out += 1
        self._tokens_out += part.num_rows
        self._pairs_out += num_pairs

    def _poll(self) -> None:
        self._links.receive(0.0)

    def _take_frame(self, link: Link, frame: Frame) -> None:
        header = frame.header
        self._frames_in += 1
        self._bytes_in += HEADER_BYTES + header.payload_bytes
        ticket = self._tickets.get((header.generation, *header.call))
        if ticket is None or not ticket.expects(link.peer):
            self._late_frames_in += 1
            link.release(frame)
            return
        if header.kind is FrameKind.COMBINE:
            try:
                ticket.take_answer(link.peer, frame, link.release)
            except FrameError as exc:
                ticket.error = exc
            return
        where = f"layer {header.layer}, step {header.step}"
        if header.kind is FrameKind.FAILURE:
            text = frame.payload.tobytes().decode(errors="replace")
            ticket.error = WorkerError(f"{link.peer} failed at {where}: {text}")
        else:
            ticket.error = WorkerError(f"{link.peer} answered {where} with a dispatch")
        link.release(frame)

    def _lose_worker(self, worker: WorkerId, reason: str) -> None:
        self._routes.clear()
        for ticket in self._tickets.values():
            if ticket.error is None and ticket.expects(worker):
                ticket.error = WorkerError(
                    f"{worker} is gone at layer {ticket.layer}, step {ticket.step}: {reason}"
                )

    def _forget(self, ticket: RouterTicket) -> None:
        self._tickets.pop(ticket.call, None)
        ticket.close()

    def _layer_routes(self, layer: int) -> LayerRoutes:
        """Return the routes of a layer, made anew after a change of links or placement."""
        routes = self._routes.get(layer)
        if routes is None:
            placement = self._placement.get(layer)
            if placement is None:
                raise PlacementError(
                    f"layer {layer} has no placement; placed: {sorted(self._placement)}"
                )
            routes = index_placement(placement, connected=self._links.workers)
            self._routes[layer] = routes
        return routes


class RouterLane:
    """The dispatcher of one lane of one step; fulfils the decoder's `Dispatcher` protocol."""

    def __init__(self, router: LatentRouter, *, step: int, lane: int) -> None:
        """Dispatch through `router`."""
        self._router = router
        self._step = step
        self._lane = lane

    def begin(
        self, layer: int, z_TL: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> RouterTicket:
        """Start the routed experts of a layer; see `LatentRouter.begin`."""
        return self._router.begin(
            layer, z_TL, expert_ids_TK, weights_TK, step=self._step, lane=self._lane
        )

    def finish(self, ticket: DispatchTicket) -> Tensor:
        """Wait for the answers and return their weighted sum `[T, L]`, float32."""
        return self._router.finish(ticket)


def _own_ticket(ticket: DispatchTicket) -> RouterTicket:
    if not isinstance(ticket, RouterTicket):
        raise RoutingError(f"{type(ticket).__name__} is no ticket of this router")
    return ticket
