"""The servers of a gateway: health, reflection, HTTP, ports, draining, traces."""

import asyncio
import json

import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.grpc_server import SERVICE
from cluster.telemetry import RequestTracer, provider_for
from configs import errors
from configs.ids import GatewayId
from tests.fakes.gateway_house import (
    answer_of,
    ask,
    ended,
    error_of,
    health_of,
    http_get,
    wait_health,
    wait_idle,
)

pytestmark = pytest.mark.asyncio


async def test_health_is_served_overall_and_for_the_service(house):
    _, gateway, _ = await house.simple()
    assert await health_of(house, gateway) == "SERVING"
    assert await health_of(house, gateway, SERVICE) == "SERVING"


async def test_reflection_lists_the_services(house):
    _, gateway, _ = await house.simple()
    stub = reflection_pb2_grpc.ServerReflectionStub(await house.channel(gateway))
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in stub.ServerReflectionInfo(iter([request])):
        names = {service.name for service in response.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_unknown_method_of_the_service_is_unimplemented(house):
    _, gateway, _ = await house.simple()
    channel = await house.channel(gateway)
    error, status = await error_of(channel.unary_unary(f"/{SERVICE}/Embed")(b""))
    assert (type(error), status.name) == (errors.UnsupportedError, "UNIMPLEMENTED")


@pytest.mark.parametrize("data", [b"\x12\x02\xff\xfe", b"\xff"], ids=["bad UTF-8", "no message"])
@pytest.mark.parametrize("method", ["Generate", "Score"])
async def test_stream_request_that_cannot_be_decoded_is_invalid(house, method, data):
    _, gateway, _ = await house.simple()
    channel = await house.channel(gateway)
    call = channel.unary_stream(f"/{SERVICE}/{method}", request_serializer=lambda data: data)
    error, status = await error_of(call(data))
    assert (type(error), status.name) == (errors.InvalidRequestError, "INVALID_ARGUMENT")
    assert f"not a valid message of type latentmesh.v1.{method}Request" in error.message


async def test_topology_request_that_cannot_be_decoded_is_invalid(house):
    _, gateway, _ = await house.simple()
    channel = await house.channel(gateway)
    call = channel.unary_unary(f"/{SERVICE}/GetTopology", request_serializer=lambda data: data)
    error, status = await error_of(call(b"\xff"))
    assert (type(error), status.name) == (errors.InvalidRequestError, "INVALID_ARGUMENT")
    assert "not a valid message of type latentmesh.v1.GetTopologyRequest" in error.message


async def test_http_health_describes_the_gateway(house):
    _, gateway, _ = await house.simple()
    code, body = await http_get(gateway, "/health")
    assert code == 200
    assert json.loads(body) == {
        "status": "serving",
        "gateway": "g0",
        "connected_attention_workers": 1,
        "running_requests": 0,
    }


async def test_metrics_count_what_was_served(house):
    _, gateway, stub = await house.simple()
    await answer_of(stub.Generate(ask(max_tokens=20)))
    await wait_idle(gateway)
    code, body = await http_get(gateway, "/metrics")
    assert code == 200
    lines = body.splitlines()
    assert 'latentmesh_requests_total{end_reason="finished",operation="generate"} 1.0' in lines
    assert "latentmesh_output_tokens_total 20.0" in lines
    assert "latentmesh_prompt_tokens_total 3.0" in lines
    assert "latentmesh_time_to_first_token_seconds_count 1.0" in lines
    assert "latentmesh_requests_running 0.0" in lines
    assert not [line for line in lines if "_created" in line]


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
async def test_port_in_use_is_refused_by_name(house, port):
    worker, gateway, _ = await house.simple()
    address = gateway.bound.grpc if port == "grpc_port" else gateway.bound.http
    with pytest.raises(errors.PortInUseError, match=rf"api\.{port}: port \d+ on 127"):
        await house.gateway(worker, **{port: int(address.rsplit(":", 1)[1])})


async def test_address_of_another_machine_is_refused(house):
    worker = await house.worker()
    with pytest.raises(errors.ConfigError, match=r"192\.0\.2\.1"):
        await house.gateway(worker, host="192.0.2.1")


async def test_two_gateways_share_a_worker_and_mix_nothing_up(house):
    worker = await house.worker()
    gateways = [await house.gateway(worker, gateway=GatewayId(f"g{index}")) for index in range(2)]
    stubs = [await house.stub(gateway) for gateway in gateways]
    calls = [
        answer_of(stub.Generate(ask(max_tokens=100, ignore_eos=True)))
        for stub in stubs
        for _ in range(3)
    ]
    answers = await asyncio.gather(*calls)
    assert all(token_ids == [(10 + i) % 64 for i in range(100)] for token_ids, _ in answers)
    assert len({finished.request_id for _, finished in answers}) == 6
    for gateway in gateways:
        await wait_idle(gateway)
        assert ended(gateway, "finished") == 3


async def test_frequent_pings_do_not_end_the_connection(house):
    worker, gateway, _ = await house.simple(is_manual=True)
    stub = await house.stub(
        gateway,
        **{
            "grpc.keepalive_time_ms": 10,
            "grpc.keepalive_permit_without_calls": 1,
            "grpc.http2.max_pings_without_data": 0,
        },
    )
    clock = await house.stub(gateway)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    for _ in range(300):
        await clock.GetTopology(pb.GetTopologyRequest())
    await worker.send_tokens(submit, [5])
    await worker.send_end(submit)
    assert (await answer_of(call))[0] == [5]


async def test_draining_refuses_new_requests_and_finishes_running_ones(house):
    worker, gateway, stub = await house.simple(is_manual=True)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    draining = asyncio.create_task(gateway.drain())
    await wait_health(house, gateway, "NOT_SERVING")
    error, status = await error_of(stub.Generate(ask()))
    assert (type(error), status.name) == (errors.ShuttingDownError, "UNAVAILABLE")
    await worker.send_tokens(submit, [5])
    await worker.send_end(submit)
    assert (await answer_of(call))[0] == [5]
    await draining


async def test_requests_that_outlast_draining_end_as_unavailable(house):
    worker = await house.worker(is_manual=True)
    gateway = await house.gateway(worker, drain_timeout_s=0.05)
    stub = await house.stub(gateway)
    call = stub.Generate(ask())
    submit = await worker.submitted.get()
    await gateway.drain()
    error, status = await error_of(call)
    assert (type(error), status.name) == (errors.ShuttingDownError, "UNAVAILABLE")
    assert (await worker.cancelled.get()).request_id == submit.request_id


async def test_stopping_is_idempotent_and_frees_the_ports(house):
    worker, gateway, _ = await house.simple()
    await asyncio.gather(gateway.stop(), gateway.stop())
    ports = [int(address.rsplit(":", 1)[1]) for address in (gateway.bound.grpc, gateway.bound.http)]
    again = await house.gateway(worker, grpc_port=ports[0], http_port=ports[1])
    assert again.bound == gateway.bound


async def test_request_is_a_span_in_the_trace_of_its_caller(house):
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(provider_for(exporter, service_instance="g0"))
    worker = await house.worker()
    gateway = await house.gateway(worker, tracer=tracer)
    stub = await house.stub(gateway)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await answer_of(stub.Generate(ask(max_tokens=4), metadata=(("traceparent", parent),)))
    await gateway.stop()
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.name == "text_completion k3"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert expected.items() <= dict(span.attributes).items()
