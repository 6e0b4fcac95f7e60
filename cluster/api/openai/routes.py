"""The routes under /v1."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.answers import Chunk, Finished
from cluster.api.inference import Inference
from cluster.api.openai.bodies import BodyLimits, read_body, read_call
from cluster.api.openai.chat_fields import ChatRequest
from cluster.api.openai.chat_route import ChatCompletion
from cluster.api.openai.completion_fields import CompletionRequest
from cluster.api.openai.completion_route import TextCompletion
from cluster.api.openai.disconnect import EventStream, until_gone
from cluster.api.openai.document import ERRORS, body_of, streamed
from cluster.api.openai.errors import JSON_TYPE, error_body, internal_body
from cluster.api.openai.replies import ChatReply, ModelListReply, ModelReply, TextReply
from cluster.api.openai.unforeseen import UnforeseenErrors
from configs.errors import ServingError, UnknownModelError

OWNER = "latentmesh"

Events = AsyncGenerator[Chunk | Finished, None]


class Completion(Protocol):
    """Answers one request; both kinds do."""

    async def start(self) -> Events:
        """Return the events."""

    async def whole(self, events: Events) -> dict[str, Any]:
        """Return the whole answer."""

    def pieces(self, events: Events) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects of a stream."""


def make_routes(
    inference: Inference, unforeseen: UnforeseenErrors, limits: BodyLimits
) -> APIRouter:
    """Return the routes.

    Args:
        inference: Answers.
        unforeseen: Told of failures that are none of our exceptions.
        limits: Of bodies.
    """
    router = APIRouter(prefix="/v1")
    model = {
        "id": inference.limits.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": OWNER,
        "max_model_len": inference.limits.context_tokens,
    }

    @router.get("/models", response_model=ModelListReply, summary="List the models")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [model]})

    @router.get(
        "/models/{model_id:path}",
        response_model=ModelReply,
        responses={404: ERRORS[404]},
        summary="Describe a model",
    )
    async def get_model(model_id: str) -> Response:
        if model_id != model["id"]:
            raise UnknownModelError(
                f"model {model_id!r} is not served here; served: {model['id']!r}"
            )
        return _json(model)

    @router.post(
        "/chat/completions",
        summary="Answer a conversation",
        responses=streamed(ChatReply),
        openapi_extra=body_of(ChatRequest),
    )
    async def chat(request: Request) -> Response:
        wanted = await read_body(request, ChatRequest, limits)
        completion = ChatCompletion(inference, wanted, read_call(request))
        return await _answer(request, completion, unforeseen, is_stream=bool(wanted.stream))

    @router.post(
        "/completions",
        summary="Continue a text",
        responses=streamed(TextReply),
        openapi_extra=body_of(CompletionRequest),
    )
    async def complete(request: Request) -> Response:
        wanted = await read_body(request, CompletionRequest, limits)
        completion = TextCompletion(inference, wanted, read_call(request))
        return await _answer(request, completion, unforeseen, is_stream=bool(wanted.stream))

    return router


async def _answer(
    request: Request, completion: Completion, unforeseen: UnforeseenErrors, *, is_stream: bool
) -> Response:
    if not is_stream:
        return _json(await until_gone(request, _whole(completion)))
    pieces = await until_gone(request, _begun(completion))
    return EventStream(_events(pieces, unforeseen, request.url.path))


async def _whole(completion: Completion) -> dict[str, Any]:
    return await completion.whole(await completion.start())


async def _begun(completion: Completion) -> AsyncGenerator[dict[str, Any], None]:
    """Return the objects of a stream once the first is there: until then an error has a status."""
    pieces = completion.pieces(await completion.start())
    first = await anext(pieces)

    async def all_pieces() -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(pieces):  # type: ignore[type-var]  # a generator
            yield first
            async for piece in pieces:
                yield piece

    return all_pieces()


async def _events(
    pieces: AsyncGenerator[dict[str, Any], None], unforeseen: UnforeseenErrors, path: str
) -> AsyncIterator[bytes]:
    encode = msgspec.json.Encoder().encode
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                yield b"data: " + encode(piece) + b"\n\n"
        except ServingError as exc:
            yield b"data: " + encode(error_body(exc)) + b"\n\n"
            return
        except Exception as exc:  # noqa: BLE001 - the barrier: a stream has no status any more
            unforeseen.note(path, exc)
            yield b"data: " + encode(internal_body()) + b"\n\n"
            return
    yield b"data: [DONE]\n\n"


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON_TYPE)
