"""Pause of running streams whose attention worker drains, beside the gaps between their tokens.

Two attention and two expert workers in processes of their own on the random checkpoint of
`latentmesh init-checkpoint`, `numerics: invariant`; gateway and gRPC client in this process. While
both attention workers run the same number of streams, one is told to move its requests out.
Measured with snapshot memory, where copies are restored, and without, where the other worker
refuses them and computes all tokens again. Tokens must equal those of an undisturbed run on the
same workers. See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import torch

from actors.request_mover import MAX_MOVING
from actors.worker_settings import SnapshotSettings
from benchmarks.machine import hardware_name
from benchmarks.worker_pool import TIMEOUT_S, Remote, start_gateway, start_pool
from cluster.api.generated.latentmesh.v1 import inference_pb2 as pb
from cluster.api.generated.latentmesh.v1 import inference_pb2_grpc
from model.checkpoint_spec import CheckpointSpec
from model.checkpoint_writer import write_checkpoint

NUM_TOKENS = 200
NUM_BEFORE = 20
"""Tokens that the last stream has when the worker drains."""
POLL_S = 0.002
WAYS = {
    "restored": SnapshotSettings(memory_bytes=256 << 20),
    "computed again": SnapshotSettings(memory_bytes=0),
}
Stream = list[tuple[float, list[int]]]
"""Arrival of each message, and its tokens."""


@dataclass(frozen=True, slots=True)
class Result:
    """One drain. Times in milliseconds, as a client sees them."""

    way: str
    streams: int
    """Running on the worker that drains; as many run on the other one."""
    steady_p50: float
    steady_p99: float
    steady_max: float
    pause_p50: float
    """Of the longest gap of each moved stream after the order to drain."""
    pause_max: float
    stayed_max: float
    """Longest gap of the streams that were on the other worker, after the order."""
    empty_after: float
    """From the order until the worker had no request left."""
    restored: int


async def run_streams(
    stub: Any,  # noqa: ANN401 - generated, without types
    num_streams: int,
    disturb: Callable[[], Any] | None,
) -> list[Stream]:
    """Run streams side by side; each begins after the one before it, so that workers alternate."""
    streams: list[Stream] = [[] for _ in range(num_streams)]
    begun = [asyncio.Event() for _ in streams]
    is_time = asyncio.Event()

    async def read(index: int) -> None:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[(31 * index + i) % 256 for i in range(100 + 4 * index)]),
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            sampling=pb.SamplingParams(temperature=1.0, seed=index),
        )
        num_tokens = 0
        async for response in stub.Generate(request, timeout=TIMEOUT_S):
            if response.chunk.token_ids:
                streams[index].append((time.perf_counter(), list(response.chunk.token_ids)))
                num_tokens += len(response.chunk.token_ids)
                begun[index].set()
                if index == num_streams - 1 and num_tokens >= NUM_BEFORE:
                    is_time.set()

    async with asyncio.TaskGroup() as group:
        for index in range(num_streams):
            group.create_task(read(index))
            await begun[index].wait()
        if disturb is not None:
            await is_time.wait()
            await disturb()
    return streams


def gaps_ms(stream: Stream, since: float, until: float = float("inf")) -> list[float]:
    """Return the times between messages of which the second came after `since`."""
    times = [at for at, _ in stream if at <= until]
    return [1e3 * (b - a) for a, b in pairwise(times) if b > since]


def tokens_of(streams: Sequence[Stream]) -> list[list[int]]:
    """Return the tokens of each stream."""
    return [[token for _, tokens in stream for token in tokens] for stream in streams]


class Drain:
    """Orders a worker to move its requests out and waits until it has none."""

    def __init__(self, leaving: Remote) -> None:
        """Take the worker."""
        self._leaving = leaving
        self.ordered_at = 0.0
        self.empty_after_ms = 0.0

    async def run(self) -> None:
        """Drain it; exits if it is not empty in time."""
        self.ordered_at = time.perf_counter()
        await asyncio.to_thread(self._leaving.call, "move_out")
        while not await asyncio.to_thread(self._is_empty):
            if time.perf_counter() - self.ordered_at > TIMEOUT_S:
                raise SystemExit(f"the worker is not empty after {TIMEOUT_S} s")
            await asyncio.sleep(POLL_S)
        self.empty_after_ms = 1e3 * (time.perf_counter() - self.ordered_at)

    def _is_empty(self) -> bool:
        stats = self._leaving.call("stats")
        return bool(self._leaving.call("is_drained")) and not (
            stats.running_requests + stats.queued_requests + stats.used_blocks + stats.used_slots
        )


async def measure(way: str, num_streams: int, checkpoint: Path) -> Result:
    """Run all streams undisturbed, then again with a drain between; compare and measure."""
    spec = CheckpointSpec()
    with ExitStack() as stack:
        pool = await asyncio.to_thread(
            start_pool, stack, checkpoint, spec.dims, WAYS[way], 2 * num_streams
        )
        leaving, staying = pool.attention
        gateway = await start_gateway(pool, spec.dims)
        drain = Drain(leaving)
        async with grpc.aio.insecure_channel(gateway.bound.grpc) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
            expected = await run_streams(stub, 2 * num_streams, None)
            streams = await run_streams(stub, 2 * num_streams, drain.run)
        await gateway.stop()
        num_moved = leaving.call("stats").moved_requests
        num_restored = staying.call("stats").restores
    if tokens_of(streams) != tokens_of(expected):
        raise SystemExit(f"{way}: tokens differ from those of the undisturbed run")
    if num_moved != num_streams:
        raise SystemExit(f"{way}: {num_moved} streams moved, expected {num_streams}")
    all_begun = max(stream[0][0] for stream in expected)
    first_end = min(stream[-1][0] for stream in expected)
    steady = sorted(gap for one in expected for gap in gaps_ms(one, all_begun, first_end))
    # Streams began one after the other, so that workers took turns: the first got the first.
    pauses = [max(gaps_ms(stream, drain.ordered_at)) for stream in streams[::2]]
    return Result(
        way=way,
        streams=num_streams,
        steady_p50=statistics.median(steady),
        steady_p99=steady[int(0.99 * (len(steady) - 1))],
        steady_max=steady[-1],
        pause_p50=statistics.median(pauses),
        pause_max=max(pauses),
        stayed_max=max(max(gaps_ms(stream, drain.ordered_at)) for stream in streams[1::2]),
        empty_after=drain.empty_after_ms,
        restored=num_restored,
    )


def format_table(results: Sequence[Result]) -> str:
    """Return a Markdown table."""
    names = ["moved requests are", "streams", "gap p50", "p99", "max", "pause p50", "pause max"]
    names += ["others' gap max", "empty after", "restored"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for r in results:
        times = (r.steady_p50, r.steady_p99, r.steady_max, r.pause_p50, r.pause_max, r.stayed_max)
        cells = [r.way, str(r.streams), *(f"{t:.0f}" for t in (*times, r.empty_after))]
        lines.append(f"| {' | '.join(cells)} | {r.restored} |")
    return "\n".join(lines)


def write_report(results: Sequence[Result], command: str, folder: Path) -> Path:
    """Write the result file of today and return its path."""
    path = folder / f"drain_pause_{hardware_name()}_{datetime.now(UTC).strftime('%Y%m%d')}.md"
    load, timeout_s = os.getloadavg(), SnapshotSettings().transfer_timeout_s
    path.write_text(
        f"# Pause of streams whose attention worker drains\n\n"
        f"Machine: {hardware_name()}, {psutil.virtual_memory().total >> 30} GiB.\n"
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"grpcio {grpc.__version__}.\n"
        f"Load of the machine over the last minute (1 and 5): {load[0]:.1f} and {load[1]:.1f}.\n"
        f"Command: `{command}`\n\n{format_table(results)}\n\n"
        f"Milliseconds at a gRPC client. `streams` run on the worker that drains and as many on "
        f"the other one, {NUM_TOKENS} tokens each; all processes share the cores. Gaps are those "
        f"of the undisturbed run while all streams run; a pause is the longest gap of a moved "
        f"stream after the order. Tokens equal those of the undisturbed run, and the worker that "
        f"drained has no block and no slot in use.\n\n"
        f"Bound of a pause while the other worker has room: {MAX_MOVING} x "
        f"`attention_pool.snapshots.transfer_timeout_s` ({timeout_s:g} s each: {MAX_MOVING} "
        f"requests leave at once through one sender), plus a step of each worker, plus the restore "
        f"or the computation of all its tokens again.\n"
    )
    return path


async def measure_all(num_streams: int) -> list[Result]:
    """Measure both ways, each on fresh workers."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, CheckpointSpec(), seed=0)
        return [await measure(way, num_streams, checkpoint) for way in WAYS]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8, help="streams on each worker")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--results", type=Path, help="folder for the result file; none: no file")
    options = parser.parse_args()
    results = asyncio.run(measure_all(options.streams))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(format_table(results))
    if options.results is not None:
        command = "python -m benchmarks.drain_pause " + " ".join(sys.argv[1:])
        print(write_report(results, command, options.results), file=sys.stderr)


if __name__ == "__main__":
    main()
