"""The HTTP side of a gateway: health, metrics, and the routes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.access.guard import AccessGuard
from cluster.api.http_guard import HttpGuard
from cluster.api.inference import Inference
from cluster.api.openai.bodies import BodyLimits
from cluster.api.openai.document import add_bodies
from cluster.api.openai.errors import (
    JSON_TYPE,
    error_response,
    internal_error_response,
    plain_error_response,
)
from cluster.api.openai.replies import HealthReply
from cluster.api.openai.routes import make_routes
from cluster.api.openai.unforeseen import UnforeseenErrors
from cluster.telemetry import EXPOSITION_TYPE, Metrics
from configs.errors import ServingError

TITLE: Final = "Latentmesh"


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Body of /health."""

    status: str
    """`serving` or `not_serving`."""
    gateway: str
    connected_attention_workers: int
    running_requests: int


def make_http_app(
    health: Callable[[], HealthReport],
    metrics: Metrics,
    inference: Inference,
    guard: AccessGuard,
    limits: BodyLimits,
) -> ASGIApp:
    """Return the app: `/health`, `/metrics`, `/openapi.json` and `/v1`.

    Args:
        health: Whether requests are taken.
        metrics: Shown, and counted in.
        inference: Answers.
        guard: Lets requests under `/v1` in.
        limits: Of bodies.
    """
    unforeseen = UnforeseenErrors(metrics)
    # No pages that load scripts from elsewhere.
    app = FastAPI(title=TITLE, version="1", docs_url=None, redoc_url=None)

    @app.get("/health", responses={200: {"model": HealthReply}, 503: {"model": HealthReply}})
    async def get_health() -> Response:
        report = health()
        return JSONResponse(asdict(report), status_code=200 if report.status == "serving" else 503)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def get_metrics() -> Response:
        return Response(metrics.exposition(), media_type=EXPOSITION_TYPE)

    app.include_router(make_routes(inference, unforeseen, limits))
    app.add_exception_handler(ServingError, _tell_serving_error)
    app.add_exception_handler(HTTPException, _tell_http_error)
    _describe_bodies(app)
    return HttpBarrier(HttpGuard(app, guard), unforeseen)


class HttpBarrier:
    """Outermost layer: checks the kind of body, and lets nothing unforeseen reach a client."""

    def __init__(self, app: ASGIApp, unforeseen: UnforeseenErrors) -> None:
        """Guard `app`."""
        self._app = app
        self._unforeseen = unforeseen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        if scope["method"] == "POST" and not _is_json(scope):
            refusal = plain_error_response(
                415, f"Content-Type must be {JSON_TYPE}", "UNSUPPORTED_MEDIA_TYPE"
            )
            await refusal(scope, receive, send)
            return
        has_begun = False

        async def watched(message: Any) -> None:  # noqa: ANN401 - an ASGI message
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as exc:  # noqa: BLE001 - the barrier
            self._unforeseen.note(scope["path"], exc)
            if not has_begun:
                await internal_error_response()(scope, receive, send)


def _is_json(scope: Scope) -> bool:
    kinds = [value for name, value in scope["headers"] if name == b"content-type"]
    return bool(kinds) and kinds[0].split(b";")[0].strip().lower() == JSON_TYPE.encode()


async def _tell_serving_error(request: Request, exc: Exception) -> Response:
    del request
    return error_response(exc) if isinstance(exc, ServingError) else internal_error_response()


async def _tell_http_error(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, HTTPException):
        return internal_error_response()
    place = f"{request.method} {request.url.path[:100]}"
    code = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}.get(exc.status_code, "HTTP_ERROR")
    return plain_error_response(
        exc.status_code,
        f"{place}: {exc.detail}; see /openapi.json",
        code,
        dict(exc.headers or {}),
    )


def _describe_bodies(app: FastAPI) -> None:
    made: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        return add_bodies(made())

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it
