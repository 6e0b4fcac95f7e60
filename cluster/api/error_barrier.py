"""The one place where exceptions of our gRPC methods become statuses.

Ours become the row of `cluster/api/status.py`; anything else is logged with its traceback, counted,
and reaches the client as INTERNAL without a word about its cause. Bytes that are no message become
a status here too: gRPC itself would answer UNKNOWN, without our details.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from cluster.api.access.guard import AccessGuard
from cluster.api.grpc_call import credentials_of
from cluster.api.status import DETAILS_KEY, internal_status, to_grpc
from cluster.telemetry import Metrics
from configs.errors import InvalidRequestError, ServingError
from configs.ids import GatewayId
from configs.metrics import INTERNAL_ERRORS

# Quoted: gRPC's classes are generic for type checkers only.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Method: TypeAlias = "Callable[[Any, _Context], Awaitable[Any]]"
_Deserializer: TypeAlias = Callable[[bytes], Any]

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands in for a request whose bytes are no message."""

    reason: str


class ErrorBarrier(grpc.aio.ServerInterceptor):
    """Guards the methods of some services; unary requests, coroutine methods.

    Callers are let in by the access guard before anything else is looked at.
    """

    def __init__(
        self,
        services: Iterable[ServiceDescriptor],
        gateway: GatewayId,
        metrics: Metrics,
        guard: AccessGuard,
    ) -> None:
        self._guard = guard
        self._request_types = {
            f"/{service.full_name}/{method.name}": method.input_type.full_name
            for service in services
            for method in service.methods
        }
        self._metadata = {"gateway": str(gateway)}
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        """Return the method's handler, guarded when it is one of the services."""
        handler = await continuation(handler_call_details)
        name = handler_call_details.method
        if handler is None or name not in self._request_types:
            return handler
        make, method = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        if handler.response_streaming:
            make, method = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        # The types are those of synchronous servers; on an aio server methods are coroutines.
        return make(
            cast("Any", self._guarded(cast("_Method", method), name)),
            request_deserializer=_lenient(cast("_Deserializer", handler.request_deserializer)),
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, method: _Method, name: str) -> _Method:
        async def guarded(request: Any, context: _Context) -> Any:  # noqa: ANN401 - any message
            try:
                async with self._guard.enter(credentials_of(context, name)):
                    self._check_decoded(request, name)
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

    def _check_decoded(self, request: object, name: str) -> None:
        # Not raised by the deserializer: gRPC answers its exceptions before any method runs.
        if isinstance(request, _Undecodable):
            raise InvalidRequestError(
                f"the bytes sent to {name} are not a valid message of type "
                f"{self._request_types[name]} ({request.reason}); send one that is encoded with "
                "the published proto, text as UTF-8"
            )


def _lenient(deserialize: _Deserializer) -> _Deserializer:
    """Return a deserializer that never fails on bytes: it returns `_Undecodable` instead."""

    def lenient(data: bytes) -> Any:  # noqa: ANN401 - any message
        try:
            return deserialize(data)
        except DecodeError as exc:
            return _Undecodable(str(exc).strip())

    return lenient


async def _abort(context: _Context, status: status_pb2.Status) -> NoReturn:
    await context.abort(
        _CODES[status.code],
        status.message,
        ((DETAILS_KEY, status.SerializeToString()),),
    )
