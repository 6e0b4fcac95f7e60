"""What a gRPC call tells of itself, for all services of the server."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc.aio

from cluster.api.inference import CallContext

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic for type checkers only


def call_of(context: _Context) -> CallContext:
    """Return the deadline and the metadata of a call; binary values are left out."""
    metadata = context.invocation_metadata()
    pairs = () if metadata is None else metadata
    return CallContext(
        timeout_s=context.time_remaining(),
        carrier={key: value for key, value in pairs if isinstance(value, str)},
    )
