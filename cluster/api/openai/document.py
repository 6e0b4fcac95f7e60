"""The OpenAPI document's parts that FastAPI cannot know: bodies that routes read themselves."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cluster.api.openai.bodies import TIMEOUT_HEADER
from cluster.api.openai.chat_fields import ChatRequest
from cluster.api.openai.completion_fields import CompletionRequest
from cluster.api.openai.replies import ErrorReply

_PLACE: Final = "#/components/schemas/{model}"

ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorReply, "description": "A field cannot be used; `param` names it."},
    401: {"model": ErrorReply, "description": "No API key, or one that is not good."},
    404: {"model": ErrorReply, "description": "The model is not served here."},
    413: {"model": ErrorReply, "description": "The request can never fit."},
    415: {"model": ErrorReply, "description": "The body is not said to be JSON."},
    429: {"model": ErrorReply, "description": "A limit is reached; see Retry-After."},
    500: {"model": ErrorReply, "description": "A failure of the server; it is logged."},
    503: {"model": ErrorReply, "description": "No worker can take it now; see Retry-After."},
    504: {"model": ErrorReply, "description": "The request's own deadline passed."},
}


def body_of(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a route that reads a JSON body and an optional timeout."""
    reference = {"$ref": _PLACE.format(model=kind.__name__)}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": reference}},
        },
        "parameters": [
            {
                "name": TIMEOUT_HEADER,
                "in": "header",
                "required": False,
                "description": "Deadline of the whole request, seconds.",
                "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9},
            }
        ],
    }


def streamed(kind: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route that answers at once or in a stream."""
    event = {
        "type": "object",
        "description": "One event; `data` is a JSON object, and `[DONE]` at the end.",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
    }
    return {
        200: {"model": kind, "content": {"text/event-stream": {"schema": event}}},
        **ERRORS,
    }


def add_bodies(document: dict[str, Any]) -> dict[str, Any]:
    """Add the schemas of request bodies to the document."""
    models = [(kind, "validation") for kind in (ChatRequest, CompletionRequest)]
    _, schemas = models_json_schema(models, ref_template=_PLACE)  # type: ignore[arg-type]
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
    return document
