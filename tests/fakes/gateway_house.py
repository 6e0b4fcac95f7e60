"""Gateways with fake attention workers and real gRPC clients, for integration tests."""

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.api.gateway import AttentionEndpoint, Gateway, GatewaySettings
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.generated.latentmesh.v1 import inference_pb2_grpc
from cluster.api.status import from_grpc
from cluster.api.topology import (
    AttentionWorkerView,
    ExpertWorkerView,
    LayerPlacementView,
    ModelView,
    TopologyView,
)
from configs.ids import ClusterId, GatewayId, Generation, WorkerId
from tests.fakes.fake_attention_worker import FakeAttentionWorker

VIEW = TopologyView(
    model=ModelView("k3", 900, 64, has_tokenizer=False, num_layers=4, num_experts=8,
                    num_experts_per_token=2, hidden_size=32, latent_size=16),
    attention_workers=(AttentionWorkerView(WorkerId("attention-0"), 7, "n", transports=("shm",)),),
    expert_workers=(ExpertWorkerView(WorkerId("expert-0"), 8, "n", busy_s=1.5),),
    membership_generation=Generation(3),
    layers=(LayerPlacementView(1, 2, ((0,), (0,))),),
    config_json="{}",
    cluster_id=ClusterId("c"),
    version="0",
)  # fmt: skip


class FixedTopology:
    """Answers with a view, or raises."""

    def __init__(self, answer=VIEW):
        self.answer = answer

    async def snapshot(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class House:
    """Starts workers, gateways and channels, and closes them in reverse."""

    def __init__(self, stack):
        self._stack = stack

    def close_later(self, close):
        self._stack.push_async_callback(close)

    def enter(self, context):
        return self._stack.enter_context(context)

    async def worker(self, name="attention-0", **kwargs):
        worker = await FakeAttentionWorker.start(name, **kwargs)
        self._stack.push_async_callback(worker.close)
        return worker

    async def gateway(self, *workers, topology=None, load=None, tracer=None, **kwargs):
        values = {
            "gateway": GatewayId("g0"),
            "host": "127.0.0.1",
            "grpc_port": 0,
            "http_port": 0,
            "model_name": "k3",
            "max_message_bytes": 1 << 20,
            "max_running_requests": 8,
            "drain_timeout_s": 5.0,
            "vocab_size": 64,
            "context_tokens": 900,
            "eos_token_ids": (2,),
            "tokenizer_folder": None,
        }
        gateway = await Gateway.start(
            GatewaySettings(**{**values, **kwargs}),
            [AttentionEndpoint(worker.name, worker.address) for worker in workers],
            FixedTopology() if topology is None else topology,
            load=load,
            tracer=tracer,
        )
        self._stack.push_async_callback(gateway.stop)
        return gateway

    async def channel(self, gateway, **options):
        # Channels of one process share connections by default; these are separate clients.
        pairs = [("grpc.use_local_subchannel_pool", 1), *options.items()]
        channel = grpc.aio.insecure_channel(gateway.bound.grpc, options=pairs)
        self._stack.push_async_callback(channel.close)
        return channel

    async def stub(self, gateway, **options):
        return inference_pb2_grpc.InferenceServiceStub(await self.channel(gateway, **options))

    async def simple(self, **worker_options):
        worker = await self.worker(**worker_options)
        gateway = await self.gateway(worker)
        return worker, gateway, await self.stub(gateway)


def ask(*ids, **kwargs):
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids or (1, 2, 3)), **kwargs)


async def answer_of(call):
    """All token ids of a stream, and its last message."""
    token_ids = []
    async for response in call:
        token_ids.extend(response.chunk.token_ids)
    return token_ids, response.finished


async def error_of(call):
    """The exception that a failed call stands for, and its status code."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (answer_of(call) if hasattr(call, "__aiter__") else call)
    return from_grpc(caught.value), caught.value.code()


async def http_get(gateway, path):
    host, port = gateway.bound.http.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    data = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = data.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


async def health_of(house, gateway, service=""):
    stub = health_pb2_grpc.HealthStub(await house.channel(gateway))
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def wait_health(house, gateway, wanted):
    stub = health_pb2_grpc.HealthStub(await house.channel(gateway))
    async for response in stub.Watch(health_pb2.HealthCheckRequest()):
        if health_pb2.HealthCheckResponse.ServingStatus.Name(response.status) == wanted:
            return


def ended(gateway, reason, operation="generate"):
    return gateway.metrics.value(
        "latentmesh_requests_total", operation=operation, end_reason=reason
    )


async def wait_idle(gateway):
    await gateway._router.wait_idle()
