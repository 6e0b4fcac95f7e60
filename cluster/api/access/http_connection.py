"""One HTTP connection: TLS with a log of failed handshakes, and bounds against slow clients.

uvicorn's own TLS swallows failed handshakes, and it waits without end for a request's head and for
the rest of a body whose request was answered already. Here the TLS handshake runs on an accepted
connection (`loop.start_tls`), which raises what went wrong where the peer is known.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.api.access.client_certificate import failure_of, subject_of
from cluster.api.access.keys import Refusal
from cluster.api.access.refusals import Refusals
from cluster.api.gateway_settings import ConnectionSettings

SUBJECT_KEY: Final = "latentmesh.certificate_subject"
"""Where a request's ASGI scope holds the subject of the verified client certificate."""


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """What every connection of a server needs to know."""

    refusals: Refusals
    connections: ConnectionSettings
    tls: ssl.SSLContext | None = None


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with a door in front."""

    app: Any

    def __init__(self, *args: Any, access: HttpAccess, **kwargs: Any) -> None:  # noqa: ANN401 - uvicorn's
        super().__init__(*args, **kwargs)
        self._access = access
        self._is_open = False
        self._is_in_head = True
        """From the end of a request to the end of the next one's head."""
        self._peer = "an unknown peer"
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._handshake: asyncio.Task[None] | None = None
        self._early: list[bytes] = []

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - any transport
        """Begin the handshake, or the first request where there is no TLS."""
        self._peer = _name(transport.get_extra_info("peername"))
        if self._access.tls is None:
            self._open(transport)
            return
        # What comes before TLS listens must stay in the kernel.
        transport.pause_reading()
        self._handshake = asyncio.get_running_loop().create_task(
            self._start_tls(transport, self._access.tls), name="TLS handshake"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """End what runs; a handshake that is refused was never a connection of uvicorn's."""
        self._stop_timer()
        if self._is_open:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; a request's head is bounded in time and size."""
        if not self._is_open:
            # They came with the end of the handshake, before the task that awaits it goes on.
            self._early.append(data)
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        limit = self._access.connections.max_header_bytes
        if self._is_in_head and self._head_bytes > limit:
            self._cut(
                Refusal.LARGE_HEAD,
                f"the head of a request is over {limit} bytes (api.connections.max_header_bytes)",
            )
        elif self._timer is None and self._is_idle():
            # The rest of a body that nobody reads any more, or its end: uvicorn stops its own
            # keep-alive timer at every byte and starts it only after an answer.
            self._start_timer()

    def on_message_begin(self) -> None:
        """Bound the time of a head."""
        super().on_message_begin()
        self._start_timer()

    def on_headers_complete(self) -> None:
        """Leave the time of the body to the app, which reads it."""
        self._is_in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head; until it begins, uvicorn's keep-alive bounds the wait."""
        super().on_message_complete()
        self._is_in_head = True
        self._stop_timer()

    def eof_received(self) -> None:
        """Let the transport close."""
        if self._is_open:
            super().eof_received()

    def _open(self, transport: Any) -> None:  # noqa: ANN401 - any transport
        self._is_open = True
        super().connection_made(transport)
        self._start_timer()
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

    async def _start_tls(self, transport: Any, context: ssl.SSLContext) -> None:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        try:
            encrypted = await loop.start_tls(
                transport,
                self,
                context,
                server_side=True,
                ssl_handshake_timeout=self._access.connections.receive_timeout_s,
            )
        except (OSError, EOFError) as exc:
            failure = failure_of(exc)
            shown = "" if failure.certificate is None else f"certificate {failure.certificate} "
            self._access.refusals.note(
                "http",
                Refusal.HANDSHAKE,
                f"{shown}from {self._peer}",
                f"TLS handshake: {failure.reason}",
            )
            transport.abort()
            return
        if encrypted is None or encrypted.is_closing():
            return
        connection = encrypted.get_extra_info("ssl_object")
        der = None if connection is None else connection.getpeercert(binary_form=True)
        if der is not None:
            self.app = _WithSubject(self.app, subject_of(der))
        self._open(encrypted)

    def _is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _start_timer(self) -> None:
        self._stop_timer()
        connections = self._access.connections
        is_between = self._is_between_requests()
        delay_s = connections.keep_alive_s if is_between else connections.receive_timeout_s
        self._timer = self.loop.call_later(delay_s, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_between_requests(self) -> bool:
        return self._is_in_head and self._head_bytes == 0 and self.cycle is not None

    def _is_late(self) -> None:
        self._timer = None
        if self._is_between_requests():
            self.transport.close()
            return
        limit_s = self._access.connections.receive_timeout_s
        what = "head" if self._is_in_head else "body"
        self._cut(
            Refusal.SLOW_CLIENT,
            f"no whole {what} came within {limit_s:g} s (api.connections.receive_timeout_s)",
        )

    def _cut(self, reason: Refusal, why: str) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self._access.refusals.note("http", reason, f"from {self._peer}", why)
            self.transport.close()


class _WithSubject:
    """Tells the app whose certificate the connection showed."""

    def __init__(self, app: ASGIApp, subject: str) -> None:
        self._app = app
        self._subject = subject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SUBJECT_KEY] = self._subject
        await self._app(scope, receive, send)


def _name(address: Any) -> str:  # noqa: ANN401 - of any address family
    if isinstance(address, tuple) and len(address) >= 2:
        return f"{address[0]}:{address[1]}"
    return str(address) if address else "an unknown peer"
