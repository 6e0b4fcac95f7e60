"""The HTTP door: who asks is found out before the app sees the request."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.access.credentials import Credentials, find_key
from cluster.api.access.guard import AccessGuard
from cluster.api.access.http_connection import SUBJECT_KEY
from cluster.api.openai.errors import error_response
from configs.errors import AdmissionError, StateStoreError

GUARDED: Final = "/v1"
"""Health, metrics and the OpenAPI document are open to whoever reaches the port."""


class HttpGuard:
    """Lets requests under `GUARDED` in one by one; a request stays in until its answer is out."""

    def __init__(self, app: ASGIApp, guard: AccessGuard) -> None:
        """Guard `app`."""
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or tell why not."""
        if scope["type"] != "http" or not is_guarded(scope["path"]):
            await self._app(scope, receive, send)
            return
        entering = self._guard.enter(_credentials(scope))
        try:
            await entering.__aenter__()
        except (AdmissionError, StateStoreError) as exc:
            await error_response(exc)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            await entering.__aexit__(None, None, None)


def is_guarded(path: str) -> bool:
    """Return whether a path asks for credentials.

    >>> is_guarded("/v1/models"), is_guarded("/health")
    (True, False)
    """
    return path == GUARDED or path.startswith(f"{GUARDED}/")


def _credentials(scope: Scope) -> Credentials:
    client = scope.get("client")
    return Credentials(
        door="http",
        peer="an unknown peer" if client is None else f"{client[0]}:{client[1]}",
        operation=f"{scope['method']} {scope['path']}",
        key=find_key(Headers(scope=scope).items()),
        certificate=scope.get(SUBJECT_KEY),
    )
