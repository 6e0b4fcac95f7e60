"""Errors in the shape of OpenAI's API, from our own exceptions and from broken requests.

The one table of statuses is `cluster/api/status.py`.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from cluster.api.status import (
    INTERNAL_CODE,
    INTERNAL_MESSAGE,
    http_status_of,
    retry_after_of,
)
from configs.errors import InvalidRequestError, ServingError

JSON_TYPE: Final = "application/json"
MAX_VALUE_CHARS: Final = 80
_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


_FIELD = re.compile(r"(?!(str|int|float|bool)$)[a-z_$][a-zA-Z0-9_$]*")


def error_body(error: ServingError) -> dict[str, Any]:
    """Return the body that tells of an error."""
    field = error.field if isinstance(error, InvalidRequestError) else ""
    return _body(http_status_of(error), error.message, error.code, param=field)


def error_response(error: ServingError) -> Response:
    """Return the response that tells of an error, with a retry hint where one can help."""
    headers = {}
    retry_after_s = retry_after_of(error)
    if retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(retry_after_s))
    return _response(http_status_of(error), error_body(error), headers)


def plain_error_response(
    status: int, message: str, code: str, headers: dict[str, str] | None = None
) -> Response:
    """Return the response of an error of HTTP itself."""
    return _response(status, _body(status, message, code), headers or {})


def internal_body() -> dict[str, Any]:
    """Return the body of a failure that is none of our exceptions: says nothing of its cause."""
    return _body(500, INTERNAL_MESSAGE, INTERNAL_CODE)


def internal_error_response() -> Response:
    """Return the response of a failure that is none of our exceptions."""
    return _response(500, internal_body(), {})


def error_of_validation(invalid: ValidationError) -> InvalidRequestError:
    """Return the error that names the first broken field, its value and what is allowed."""
    errors = invalid.errors(include_url=False, include_context=False)
    # Of the branches of a union, one that has the right type says most.
    first = next((error for error in errors if not error["type"].endswith("_type")), errors[0])
    path = _path_of(first["loc"])
    if first["type"] == "json_invalid":
        return InvalidRequestError(f"the body is no JSON: {first['msg']}")
    if first["type"] == "extra_forbidden":
        text = f"{path} is not known here; leave it out (the OpenAPI document lists all fields)"
        return InvalidRequestError(text, field=path)
    value = repr(first["input"])
    if len(value) > MAX_VALUE_CHARS:
        value = f"{value[:MAX_VALUE_CHARS]}..."
    shown = "is missing" if first["type"] == "missing" else f"is {value}"
    return InvalidRequestError(f"{path or 'the body'} {shown}: {first['msg']}", field=path)


def _path_of(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, str) and not _FIELD.fullmatch(part):
            continue  # a branch of a union
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path[:200]


def _body(status: int, message: str, code: str, param: str = "") -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error")
    # Clients may send half a surrogate pair, which no encoder takes.
    text = message.encode("utf-8", "replace").decode()
    safe_param = None if not param else param.encode("utf-8", "replace").decode()
    return {"error": {"message": text, "type": kind, "param": safe_param, "code": code}}


def _response(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    return Response(
        msgspec.json.encode(body), status_code=status, headers=headers, media_type=JSON_TYPE
    )
