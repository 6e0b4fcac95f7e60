"""`vllm.grpc.engine.VllmEngine`, so that clients made for that service work with this server.

Its stubs are those of PyPI `smg-grpc-proto`: a copy of the same proto would collide with them in a
process that has both. The protocol carries token ids and never text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, TypeAlias

import grpc.aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from cluster.api.client_requests import ClientRequests
from cluster.api.gateway_settings import GatewaySettings
from cluster.api.grpc_call import call_of
from cluster.api.inference import CallContext, Inference
from cluster.api.params import GenerateParams
from cluster.api.tokenizer_bundle import (
    ModelNames,
    TokenizerBundle,
    build_tokenizer_bundle,
    read_model_names,
)
from cluster.api.topology import AttentionWorkerView, TopologySource, take_snapshot
from cluster.api.validation import check_generate
from cluster.api.vllm_values import AnswerMessages, read_generate, truncate_prompt
from configs.errors import InvalidRequestError, TokenizerMissingError, UnsupportedError

DESCRIPTOR: Final = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
SERVICE: Final = DESCRIPTOR.full_name
SERVER_TYPE: Final = "vllm-grpc"
"""Names the protocol, not the server: clients choose their dialect by it."""
CONSTRAINT_START: Final = "first_token"
"""A constraint holds from the first token on, also where the prompt ends inside a thought."""
BUNDLE_CHUNK_BYTES: Final = 64 << 10
_NO_PROFILER: Final = "there is no profiler to control; traces and metrics are always on"

_log = logging.getLogger(__name__)
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic for type checkers only


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # untyped package
    """See the proto. Exceptions are the barrier's business.

    Names of requests are the client's own, and `Abort` finds those of this gateway only.
    """

    def __init__(
        self, settings: GatewaySettings, inference: Inference, topology: TopologySource
    ) -> None:
        self.is_serving = False
        """Set by the owner of the server; what HealthCheck says."""
        self._settings = settings
        self._inference = inference
        self._topology = topology
        self._requests = ClientRequests()
        self._started_at = time.monotonic()
        self._bundle: TokenizerBundle | None = None
        self._names: ModelNames | None = None

    async def Generate(  # noqa: N802 - named by the proto
        self, request: vllm_engine_pb2.GenerateRequest, context: _Context
    ) -> None:
        """Stream the tokens of an answer; an aborted one ends with `finish_reason` "abort"."""
        params = read_generate(request)
        messages = AnswerMessages(num_choices=params.num_choices, is_stream=request.stream)
        answer = self._answer(request, params, messages, call_of(context))
        async with self._requests.run(request.request_id, answer) as running:
            while (message := await running.next_event()) is not None:
                await context.write(message)
            if running.is_aborted:
                for message in messages.aborted():
                    await context.write(message)

    async def Abort(  # noqa: N802 - named by the proto
        self, request: vllm_engine_pb2.AbortRequest, context: _Context
    ) -> vllm_engine_pb2.AbortResponse:
        """Abort requests; those that do not run are ignored."""
        del context
        aborted = self._requests.abort(request.request_ids)
        _log.info("clients aborted %d requests of %d named", aborted, len(request.request_ids))
        return vllm_engine_pb2.AbortResponse()

    async def Embed(  # noqa: N802 - named by the proto
        self, request: vllm_engine_pb2.EmbedRequest, context: _Context
    ) -> NoReturn:
        """Not offered."""
        raise UnsupportedError("Embed: the model that is served generates text only")

    async def StartProfile(  # noqa: N802 - named by the proto
        self, request: common_pb2.StartProfileRequest, context: _Context
    ) -> NoReturn:
        """Not offered."""
        raise UnsupportedError(f"StartProfile: {_NO_PROFILER}")

    async def StopProfile(  # noqa: N802 - named by the proto
        self, request: common_pb2.StopProfileRequest, context: _Context
    ) -> NoReturn:
        """Not offered."""
        raise UnsupportedError(f"StopProfile: {_NO_PROFILER}")

    async def SubscribeKvEvents(  # noqa: N802 - named by the proto
        self, request: common_pb2.SubscribeKvEventsRequest, context: _Context
    ) -> NoReturn:
        """Not offered: what is cached is the state at single positions, not blocks of KV."""
        raise UnsupportedError(
            "SubscribeKvEvents: this server sends requests to the worker that has their prefix "
            "itself, so clients need not know what is cached; poll GetLoads for the load"
        )

    async def FlushCache(  # noqa: N802 - named by the proto
        self, request: common_pb2.FlushCacheRequest, context: _Context
    ) -> common_pb2.FlushCacheResponse:
        """Make all workers forget the prefixes that no running request uses."""
        del request, context
        flushed = await self._inference.flush_cache()
        if flushed.failed:
            return common_pb2.FlushCacheResponse(
                success=False, message=f"{flushed.describe_failures()}; call again"
            )
        return common_pb2.FlushCacheResponse(
            success=True, message=f"forgot {flushed.num_snapshots} cached prefixes"
        )

    async def HealthCheck(  # noqa: N802 - named by the proto
        self, request: vllm_engine_pb2.HealthCheckRequest, context: _Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Whether requests are taken."""
        del request, context
        return vllm_engine_pb2.HealthCheckResponse(
            healthy=self.is_serving,
            message="serving" if self.is_serving else "draining, or no worker is connected",
        )

    async def GetModelInfo(  # noqa: N802 - named by the proto
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: _Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Describe the model. Paths are empty: clients get the tokenizer by GetTokenizer."""
        del request, context
        settings = self._settings
        names = await self._model_names()
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=settings.model_name,
            is_generation=True,
            max_context_length=settings.context_tokens,
            vocab_size=settings.vocab_size,
            served_model_name=settings.model_name,
            model_type=names.model_type,
            architectures=names.architectures,
            eos_token_ids=settings.eos_token_ids,
            pad_token_id=names.pad_token_id,
            bos_token_id=names.bos_token_id,
            max_req_input_len=settings.context_tokens - 1,
        )

    async def GetServerInfo(  # noqa: N802 - named by the proto
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: _Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Describe this gateway. `active_requests` counts those of this service."""
        del request, context
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=len(self._requests),
            uptime_seconds=time.monotonic() - self._started_at,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            max_num_seqs=self._settings.max_running_requests,
            constrained_decoding_start=CONSTRAINT_START,
        )

    async def GetLoads(  # noqa: N802 - named by the proto
        self, request: vllm_engine_pb2.GetLoadsRequest, context: _Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Report the load of all attention workers together, as rank 0."""
        del context
        if request.HasField("dp_rank") and request.dp_rank != 0:
            raise InvalidRequestError(
                f"dp_rank is {request.dp_rank}; allowed: 0 or unset (all workers are one rank)"
            )
        view = await take_snapshot(self._topology)
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=view.version,
            dp_rank_count=1,
            loads=[_load_of(view.attention_workers)],
        )

    async def GetTokenizer(  # noqa: N802 - named by the proto
        self, request: common_pb2.GetTokenizerRequest, context: _Context
    ) -> None:
        """Stream the tokenizer files as one zip; the last chunk has its fingerprint."""
        del request
        bundle = await self._tokenizer_bundle()
        for start in range(0, len(bundle.data), BUNDLE_CHUNK_BYTES):
            end = start + BUNDLE_CHUNK_BYTES
            is_last = end >= len(bundle.data)
            await context.write(
                common_pb2.GetTokenizerChunk(
                    data=bundle.data[start:end], sha256=bundle.sha256 if is_last else ""
                )
            )

    async def _answer(
        self,
        request: vllm_engine_pb2.GenerateRequest,
        params: GenerateParams,
        messages: AnswerMessages,
        call: CallContext,
    ) -> AsyncGenerator[vllm_engine_pb2.GenerateResponse, None]:
        """Yield the messages of an answer. Closing it early cancels the request."""
        prompt = await self._prompt_ids(params, request.sampling_params)
        messages.prompt = prompt
        async with aclosing(
            self._inference.generate(replace(params, prompt=prompt), call)
        ) as answer:
            async for event in answer:
                message = messages.of_event(event)
                if message is not None:
                    yield message

    async def _prompt_ids(
        self, params: GenerateParams, wanted: vllm_engine_pb2.SamplingParams
    ) -> Sequence[int]:
        limits = self._inference.limits
        prompt = params.prompt
        if prompt is None or isinstance(prompt, str):
            # Before text is encoded, which may take long.
            prompt = check_generate(params, limits)
        if isinstance(prompt, str):
            prompt = await self._inference.encode_text(prompt)
        return truncate_prompt(prompt, wanted, context_tokens=limits.context_tokens)

    async def _tokenizer_bundle(self) -> TokenizerBundle:
        folder = self._settings.tokenizer_folder
        if folder is None:
            raise TokenizerMissingError(
                "the checkpoint has no tokenizer files; send token ids, and give the client a "
                "tokenizer of its own"
            )
        if self._bundle is None:
            self._bundle = await asyncio.to_thread(build_tokenizer_bundle, folder)
        return self._bundle

    async def _model_names(self) -> ModelNames:
        folder = self._settings.tokenizer_folder
        if folder is None:
            return ModelNames()
        if self._names is None:
            self._names = await asyncio.to_thread(read_model_names, folder)
        return self._names


def _load_of(workers: Sequence[AttentionWorkerView]) -> vllm_engine_pb2.SchedulerLoad:
    num_running = sum(worker.running_requests for worker in workers)
    num_waiting = sum(worker.queued_requests for worker in workers)
    total_blocks = sum(worker.total_blocks for worker in workers)
    used_blocks = sum(worker.used_blocks for worker in workers)
    usage = used_blocks / total_blocks if total_blocks else 0.0
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=num_running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=num_running + num_waiting,
        token_usage=usage,
        utilization=usage,
        max_running_requests=sum(worker.total_slots for worker in workers),
    )
