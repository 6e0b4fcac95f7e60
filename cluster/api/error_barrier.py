"""The one place where exceptions of our gRPC methods become statuses.

Ours become the row of `cluster/api/status.py`; anything else is logged with its traceback, counted,
and reaches the client as INTERNAL without a word about its cause.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.rpc import status_pb2

from cluster.api.status import DETAILS_KEY, internal_status, to_grpc
from cluster.telemetry import Metrics
from configs.errors import ServingError
from configs.ids import GatewayId
from configs.metrics import INTERNAL_ERRORS

# Quoted: gRPC's classes are generic for type checkers only.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Method: TypeAlias = "Callable[[Any, _Context], Awaitable[Any]]"

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_log = logging.getLogger(__name__)


class ErrorBarrier(grpc.aio.ServerInterceptor):
    """Guards the methods of one service; unary requests, coroutine methods."""

    def __init__(self, service: str, gateway: GatewayId, metrics: Metrics) -> None:
        self._prefix = f"/{service}/"
        self._metadata = {"gateway": str(gateway)}
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the method's handler, guarded when it is one of the service."""
        handler = await continuation(handler_call_details)
        name = handler_call_details.method
        if handler is None or not name.startswith(self._prefix):
            return handler
        make, method = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        if handler.response_streaming:
            make, method = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        # The types are those of synchronous servers; on an aio server methods are coroutines.
        return make(
            cast("Any", self._guarded(cast("_Method", method), name)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, method: _Method, name: str) -> _Method:
        async def guarded(request: Any, context: _Context) -> Any:  # noqa: ANN401 - any message
            try:
                return await method(request, context)
            except ServingError as exc:
                await _abort(context, to_grpc(exc, self._metadata))
            except grpc.aio.AbortError:
                raise
            except Exception:  # noqa: BLE001 - the barrier: nothing unforeseen reaches a client
                _log.exception("unforeseen error in %s", name)
                self._metrics.add(INTERNAL_ERRORS, method=name)
                await _abort(context, internal_status(self._metadata))

        return guarded


async def _abort(context: _Context, status: status_pb2.Status) -> NoReturn:
    await context.abort(
        _CODES[status.code],
        status.message,
        ((DETAILS_KEY, status.SerializeToString()),),
    )
