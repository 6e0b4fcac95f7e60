"""The HTTP side of a gateway: health and metrics. The routes for completions come later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.telemetry import EXPOSITION_TYPE, Metrics


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Body of /health."""

    status: str
    """`serving` or `not_serving`."""
    gateway: str
    connected_attention_workers: int
    running_requests: int


def make_http_app(health: Callable[[], HealthReport], metrics: Metrics) -> Starlette:
    """Return the app: `/health` (200 or 503, JSON) and `/metrics` (Prometheus text)."""

    async def get_health(request: Request) -> Response:
        del request
        report = health()
        return JSONResponse(asdict(report), status_code=200 if report.status == "serving" else 503)

    async def get_metrics(request: Request) -> Response:
        del request
        return Response(metrics.exposition(), media_type=EXPOSITION_TYPE)

    return Starlette(routes=[Route("/health", get_health), Route("/metrics", get_metrics)])
