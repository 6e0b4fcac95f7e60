"""Reading the body of a request: bounded, typed, with errors that name the field."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from cluster.api.inference import CallContext
from cluster.api.openai.errors import error_of_validation
from configs.errors import InvalidRequestError, RequestCancelledError, RequestTooLargeError

TIMEOUT_HEADER: Final = "x-request-timeout-s"
THREAD_BYTES: Final = 256 << 10
"""Larger bodies are parsed in a thread: all streams share the loop."""

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How large a body may be, and how long it may take to come."""

    max_bytes: int
    timeout_s: float


async def read_body(request: Request, kind: type[B], limits: BodyLimits) -> B:
    """Return the body of a request.

    Raises:
        RequestTooLargeError: It has more than `limits.max_bytes`; the rest is not read.
        InvalidRequestError: It is not what `kind` says, or came too slowly.
        RequestCancelledError: The client left in the middle of it.
    """
    try:
        async with asyncio.timeout(limits.timeout_s):
            data = await _read_bytes(request, limits.max_bytes)
    except TimeoutError as exc:
        raise InvalidRequestError(
            f"the body did not come within {limits.timeout_s:g} s "
            "(api.connections.receive_timeout_s); send it faster"
        ) from exc
    try:
        if len(data) > THREAD_BYTES:
            return await asyncio.to_thread(kind.model_validate_json, data)
        return kind.model_validate_json(data)
    except ValidationError as exc:
        raise error_of_validation(exc) from exc


def read_call(request: Request) -> CallContext:
    """Return what HTTP knows of a call.

    Raises:
        InvalidRequestError: The timeout is no positive number of seconds.
    """
    text = request.headers.get(TIMEOUT_HEADER)
    timeout_s = None
    if text is not None:
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s < math.inf:
            raise InvalidRequestError(
                f"header {TIMEOUT_HEADER} is {text[:40]!r}; expected seconds above 0",
                field=TIMEOUT_HEADER,
            )
    return CallContext(timeout_s=timeout_s, carrier=dict(request.headers))


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise RequestTooLargeError(
                    f"the body has more than {max_bytes} bytes (api.max_message_bytes); send less"
                )
            parts.append(part)
    except ClientDisconnect as exc:
        raise RequestCancelledError("the client left while it sent its request") from exc
    return b"".join(parts)
