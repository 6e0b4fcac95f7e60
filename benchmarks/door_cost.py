"""CPU time of the gateway for one streamed message, by door, beside bare servers of the same stack.

The gateway runs in this process; a worker that counts and the clients run in two others, so what is
measured is the gateway alone: taking a step's report from the request channel, detokenising,
shaping, encoding and sending. `bare gRPC` sends one prepared message again and again, `bare HTTP`
one prepared event: what grpc.aio and uvicorn cost by themselves. See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from actors.request_channel import (
    LENGTH_BYTES,
    Credit,
    Ended,
    NewTokens,
    StepReport,
    Submit,
    Usage,
    Welcome,
    decode_length,
    decode_to_worker,
    encode_message,
)
from benchmarks.machine import hardware_name
from cluster.api.gateway import Gateway
from cluster.api.gateway_settings import AttentionEndpoint, GatewaySettings
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.generated.latentmesh.v1 import inference_pb2_grpc
from cluster.api.http_server import HttpServer
from cluster.api.topology import TopologyView
from configs.errors import WorkerError
from configs.ids import GatewayId, RequestId, WorkerId
from configs.numerics import EndReason, FinishReason
from model.tokenizer_files import BYTE_VOCAB_SIZE, special_id, write_tokenizer_files

WORKER = WorkerId("attention-0")
PERIOD_S = 0.005
"""Between two steps of the worker: so slow that no door has to send two steps as one message."""
TIMEOUT_S = 120.0
LETTERS = b"the quick brown fox jumps over the lazy dog "
CHAT = {"model": "k3", "messages": [{"role": "user", "content": "hello"}], "stream": True}


@dataclass(frozen=True, slots=True)
class Load:
    """How much is streamed in one measurement."""

    num_streams: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table."""

    door: str
    streams: int
    messages: int
    cpu_us: float
    """Of the gateway's process, per message that a client received."""
    ratio: float
    """Over the bare server of the same protocol."""


class NoTopology:
    """Nobody asks."""

    async def snapshot(self) -> TopologyView:
        """Refuse."""
        raise WorkerError("the benchmark has no topology")


class CountingWorker:
    """Answers every request with letters, one per step and request, in one report per step."""

    def __init__(self) -> None:
        """Wait for a gateway."""
        self._live: dict[tuple[RequestId, int], list[Any]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one gateway until it leaves."""
        writer.write(encode_message(Welcome(WORKER, 1, 1 << 20)))
        stepping = asyncio.create_task(self._step_for_ever(writer))
        try:
            while True:
                prefix = await reader.readexactly(LENGTH_BYTES)
                body = await reader.readexactly(decode_length(prefix))
                message = decode_to_worker(body)
                key = (message.request_id, message.attempt)
                if isinstance(message, Submit):
                    self._live[key] = [message, 0, message.credit_tokens]
                elif isinstance(message, Credit) and key in self._live:
                    self._live[key][2] += message.num_tokens
        except asyncio.IncompleteReadError:
            stepping.cancel()
            writer.close()

    async def _step_for_ever(self, writer: asyncio.StreamWriter) -> None:
        step = 0
        while True:
            await asyncio.sleep(PERIOD_S)
            step += 1
            report = self._step(step)
            if report.tokens or report.ended:
                writer.write(encode_message(report))
                await writer.drain()

    def _step(self, step: int) -> StepReport:
        tokens, ended = [], []
        for key, entry in list(self._live.items()):
            submit, num_sent, credit = entry
            if num_sent < min(credit, submit.max_tokens):
                tokens.append(NewTokens(*key, [LETTERS[num_sent % len(LETTERS)]]))
                entry[1] = num_sent = num_sent + 1
            if num_sent == submit.max_tokens:
                usage = Usage(prompt_tokens=1, output_tokens=num_sent)
                ended.append(
                    Ended(*key, EndReason.FINISHED, usage, finish_reason=FinishReason.LENGTH)
                )
                del self._live[key]
        return StepReport(step=step, tokens=tokens, ended=ended)


def run_worker(pipe: Connection) -> None:
    """Serve until killed; says its port first."""

    async def serve() -> None:
        server = await asyncio.start_server(CountingWorker().serve, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


async def read_grpc(address: str, load: Load) -> int:
    """Return the messages of all streams."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateRequest(text="hello", max_tokens=load.num_tokens, ignore_eos=True)
        return await read_calls(lambda: stub.Generate(request), load)


async def read_vllm(address: str, load: Load) -> int:
    """Return the messages of all streams."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        tokenized = vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3])
        sampling = vllm_engine_pb2.SamplingParams(max_tokens=load.num_tokens, ignore_eos=True)
        numbers = iter(range(load.num_streams))

        def call() -> Any:  # noqa: ANN401 - a gRPC call
            return stub.Generate(
                vllm_engine_pb2.GenerateRequest(
                    request_id=f"r{next(numbers)}-{time.time_ns()}",
                    tokenized=tokenized,
                    sampling_params=sampling,
                    stream=True,
                )
            )

        return await read_calls(call, load)


async def read_calls(call: Callable[[], Any], load: Load) -> int:
    """Return the messages of `num_streams` calls at once."""

    async def one() -> int:
        return len([None async for _ in call()])

    return sum(await asyncio.gather(*(one() for _ in range(load.num_streams))))


async def read_http(address: str, load: Load) -> int:
    """Return the events of all streams."""
    body = json.dumps({**CHAT, "max_tokens": load.num_tokens, "ignore_eos": True}).encode()
    host, port = address.rsplit(":", 1)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )

    async def one() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        data = await reader.read()
        writer.close()
        return data.count(b"data: ")

    return sum(await asyncio.gather(*(one() for _ in range(load.num_streams))))


READERS: dict[str, Callable[[str, Load], Awaitable[int]]] = {
    "bare gRPC": read_grpc,
    "gRPC Generate": read_grpc,
    "vllm Generate": read_vllm,
    "bare HTTP": read_http,
    "HTTP chat": read_http,
}


def run_clients(pipe: Connection) -> None:
    """Read what is asked for until told to end."""
    while (order := pipe.recv()) is not None:
        door, address, load = order
        try:
            pipe.send(asyncio.run(READERS[door](address, load)))
        except Exception as exc:  # noqa: BLE001 - told to the one who measures
            pipe.send(f"{type(exc).__name__}: {exc}")


class BareServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Sends one prepared message at the worker's pace."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # noqa: ANN401, N802
        """See the proto."""
        message = pb.GenerateResponse(chunk=pb.Chunk(token_ids=[100], text="d"))
        for _ in range(request.max_tokens):
            await context.write(message)
            await asyncio.sleep(PERIOD_S)


async def bare_event_stream(request: Request) -> StreamingResponse:
    """Send one prepared event at the worker's pace."""
    num_tokens = (await request.json())["max_tokens"]

    async def events() -> AsyncIterator[bytes]:
        for _ in range(num_tokens):
            yield b'data: {"choices":[{"index":0,"delta":{"content":"d"}}]}\n\n'
            await asyncio.sleep(PERIOD_S)

    return StreamingResponse(events(), media_type="text/event-stream")


class Bench:
    """Orders the clients about and reads this process's CPU clock."""

    def __init__(self, clients: Connection, load: Load) -> None:
        """Take over the pipe to the clients' process."""
        self._clients = clients
        self._load = load

    async def cpu_us(self, door: str, address: str) -> tuple[float, int]:
        """Return CPU microseconds per message and the messages, after a short warm-up."""
        warm_up = Load(self._load.num_streams, max(self._load.num_tokens // 4, 1))
        await self._read(door, address, warm_up)
        started = time.process_time()
        messages = await self._read(door, address, self._load)
        return (time.process_time() - started) * 1e6 / messages, messages

    async def _read(self, door: str, address: str, load: Load) -> int:
        self._clients.send((door, address, load))
        if not await asyncio.to_thread(self._clients.poll, TIMEOUT_S):
            raise SystemExit(f"{door}: no answer within {TIMEOUT_S} s")
        answer: int | str = self._clients.recv()
        if isinstance(answer, str):
            raise SystemExit(f"{door}: {answer}")
        return answer


async def measure_bare(bench: Bench) -> dict[str, tuple[float, int]]:
    """Measure the bare servers."""
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        BareServicer(), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found = {"bare gRPC": await bench.cpu_us("bare gRPC", f"127.0.0.1:{port}")}
    await server.stop(None)
    app = Starlette(routes=[Route("/v1/chat/completions", bare_event_stream, methods=["POST"])])
    http = HttpServer(app, host="127.0.0.1", port=0)
    await http.start()
    found["bare HTTP"] = await bench.cpu_us("bare HTTP", http.address)
    await http.stop()
    return found


async def measure_gateway(bench: Bench, worker_port: int) -> dict[str, tuple[float, int]]:
    """Measure the gateway's doors."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer_files(Path(folder))
        gateway = await Gateway.start(
            GatewaySettings(
                gateway=GatewayId("g0"),
                host="127.0.0.1",
                grpc_port=0,
                http_port=0,
                model_name="k3",
                max_message_bytes=1 << 20,
                max_running_requests=1024,
                drain_timeout_s=1.0,
                vocab_size=BYTE_VOCAB_SIZE,
                context_tokens=1 << 16,
                eos_token_ids=(special_id("<|end_of_msg|>"),),
                tokenizer_folder=Path(folder),
            ),
            [AttentionEndpoint(WORKER, f"tcp:127.0.0.1:{worker_port}")],
            NoTopology(),
        )
        grpc_address, http_address = gateway.bound.grpc, gateway.bound.http
        found = {
            "gRPC Generate": await bench.cpu_us("gRPC Generate", grpc_address),
            "vllm Generate": await bench.cpu_us("vllm Generate", grpc_address),
            "HTTP chat": await bench.cpu_us("HTTP chat", http_address),
        }
        await gateway.stop()
    return found


async def measure_all(load: Load) -> list[Result]:
    """Measure every door and return one line each."""
    context = multiprocessing.get_context("spawn")
    near_worker, far_worker = context.Pipe()
    near_clients, far_clients = context.Pipe()
    worker = context.Process(target=run_worker, args=(far_worker,), daemon=True)
    clients = context.Process(target=run_clients, args=(far_clients,), daemon=True)
    worker.start()
    clients.start()
    bench = Bench(near_clients, load)
    try:
        port = await asyncio.to_thread(near_worker.recv)
        found = {**await measure_bare(bench), **await measure_gateway(bench, port)}
    finally:
        near_clients.send(None)
        worker.terminate()
        clients.join(timeout=10)
    return [
        Result(
            door,
            load.num_streams,
            messages,
            cpu_us,
            cpu_us / found["bare HTTP" if "HTTP" in door else "bare gRPC"][0],
        )
        for door, (cpu_us, messages) in found.items()
    ]


def format_table(results: list[Result]) -> str:
    """Return a Markdown table."""
    lines = ["| door | streams | messages | CPU us per message | of the bare server |"]
    lines.append("|---|---|---|---|---|")
    for r in results:
        cells = (r.door, str(r.streams), str(r.messages), f"{r.cpu_us:.0f}", f"x{r.ratio:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_report(results: list[Result], command: str, folder: Path) -> Path:
    """Write the result file of today and return its path."""
    day = datetime.now(UTC).strftime("%Y%m%d")
    path = folder / f"door_cost_{hardware_name()}_{day}.md"
    load = os.getloadavg()
    path.write_text(
        f"# CPU time at the door per streamed message\n\n"
        f"Machine: {hardware_name()}, {psutil.virtual_memory().total >> 30} GiB.\n"
        f"Versions: Python {platform.python_version()}, grpcio {grpc.__version__}.\n"
        f"Load of the machine over the last minute (1 and 5): {load[0]:.1f} and {load[1]:.1f}.\n"
        f"Command: `{command}`\n\n{format_table(results)}\n\n"
        f"One token per message and stream, a step every {PERIOD_S * 1e3:g} ms. CPU time of the "
        f"gateway's process, all its threads, over the messages that the clients received.\n"
    )
    return path


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8, help="streams at once")
    parser.add_argument("--tokens", type=int, default=1000, help="messages per stream")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--results", type=Path, help="folder for the result file; none: no file")
    options = parser.parse_args()
    results = asyncio.run(measure_all(Load(options.streams, options.tokens)))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(format_table(results))
    if options.results is not None:
        command = "python -m benchmarks.door_cost " + " ".join(sys.argv[1:])
        print(write_report(results, command, options.results), file=sys.stderr)


if __name__ == "__main__":
    main()
