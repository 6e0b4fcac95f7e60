"""Time of one dispatch and combine between two processes, with the expert compute left out.

Two measures. `router`: the far side is a real `ExpertWorker` whose experts' answers lie ready, so
frames are received, checked, merged and answered as in serving, only sorting the rows by expert and
the FFN are missing; the near side is a real `LatentRouter`: plan, send, wait, weighted sum.
`frames`: the same two frames through the same links, written and copied out again, nothing else.
See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import select
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.expert_merge import PairBatch
from actors.expert_worker import ExpertWorker, ExpertWorkerSettings
from benchmarks.machine import hardware_name
from configs.errors import PeerClosedError
from configs.ids import Epoch, Generation, WorkerId
from configs.numerics import Combine, FloatType
from router.frames import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    combine_payload_bytes,
    dispatch_payload_bytes,
)
from router.latent_router import LatentRouter
from router.membership import ExpertWorkerInfo, Membership
from router.placement import plan_initial_placement
from router.settings import RouterSettings
from router.transport.base import Frame, Hello, Link
from router.transport.connect import TransportKind, connect, host_token, listen
from router.transport.wait import Waiter

WORKER = WorkerId("expert-1")
LAYER = 1
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is dispatched."""

    name: str
    num_tokens: int
    latent_size: int
    num_picks: int
    num_experts: int


SHAPES = (
    Shape("small", num_tokens=32, latent_size=256, num_picks=4, num_experts=64),
    Shape("K3", num_tokens=32, latent_size=3584, num_picks=16, num_experts=896),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. Times in microseconds."""

    measure: str
    shape: str
    transport: str
    combine: str
    median_us: float
    p10_us: float
    p90_us: float
    p99_us: float
    bytes_out: int
    bytes_in: int
    copy_us: float
    """Copying the same bytes once, out and in, within one process."""


class NoCompute:
    """Stands in for the experts: the answers were computed before."""

    def __init__(self, latent_size: int) -> None:
        """Accept latents of `latent_size` values and any expert."""
        self.latent_size = latent_size
        self._answers: dict[int, Tensor] = {}

    def check(self, layer: int, epoch: Epoch, experts_P: NDArray[np.uint32]) -> None:
        """Accept everything."""

    def run(self, batch: PairBatch) -> tuple[Tensor, int]:
        """Return prepared answers, bfloat16."""
        num_pairs = batch.rows_P.size
        if num_pairs not in self._answers:
            self._answers[num_pairs] = torch.ones(num_pairs, self.latent_size).bfloat16()
        return self._answers[num_pairs], 1


@dataclass(frozen=True, slots=True)
class Case:
    """One line to measure."""

    shape: Shape
    transport: TransportKind
    combine: Combine
    repeats: int
    is_pinned: bool

    @property
    def settings(self) -> RouterSettings:
        """Settings of the near side."""
        return RouterSettings(
            latent_size=self.shape.latent_size,
            wire_dtype=FloatType.BFLOAT16,
            combine=self.combine,
            transport=self.transport,
        )

    @property
    def header(self) -> FrameHeader:
        """Header of the dispatch, when one worker gets it all."""
        shape = self.shape
        num_pairs = shape.num_tokens * shape.num_picks
        return FrameHeader(
            kind=FrameKind.DISPATCH,
            generation=Generation(1),
            epoch=Epoch(1),
            step=0,
            layer=LAYER,
            lane=0,
            attempt=0,
            num_tokens=shape.num_tokens,
            num_pairs=num_pairs,
            latent_size=shape.latent_size,
            wire_dtype=FloatType.BFLOAT16,
            combine=self.combine,
            payload_bytes=dispatch_payload_bytes(
                num_tokens=shape.num_tokens,
                num_pairs=num_pairs,
                latent_size=shape.latent_size,
                wire_dtype=FloatType.BFLOAT16,
            ),
        )


def run_worker(folder: str, case: Case, pipe: Connection) -> None:
    """Answer dispatches until the other end of `pipe` says something."""
    prepare_process(case, core=1)
    worker = ExpertWorker(
        worker=WORKER,
        compute=NoCompute(case.shape.latent_size),
        settings=ExpertWorkerSettings(),
    )
    info = worker.listen(directory=Path(folder), host="127.0.0.1", transports=[case.transport])
    pipe.send((info.addresses, info.host_token))
    stop = threading.Event()
    thread = threading.Thread(target=worker.serve, args=(stop,))
    thread.start()
    pipe.recv()
    stop.set()
    thread.join()
    worker.close()


def run_echo(folder: str, case: Case, pipe: Connection) -> None:
    """Answer every frame with a prepared one until the peer closes."""
    prepare_process(case, core=1)
    listener = listen(case.transport, worker=WORKER, directory=Path(folder), host="127.0.0.1")
    pipe.send(((listener.address,), host_token(Path(folder))))
    while (link := listener.try_accept()) is None:
        pass
    header = answer_header(case.header)
    payload = np.ones(header.payload_bytes, np.uint8)
    waiter = Waiter(spin_s=case.settings.spin_s)
    waiter.add(link.fileno())
    try:
        while True:
            frame = receive(link, waiter)
            link.release(frame)
            link.send(header, (payload,), deadline=time.monotonic() + TIMEOUT_S)
    except PeerClosedError:
        link.close()
        listener.close()


def prepare_process(case: Case, *, core: int) -> None:
    """One thread, and a core of its own when asked for."""
    torch.set_num_threads(1)
    if case.is_pinned:
        os.sched_setaffinity(0, {core})


def answer_header(header: FrameHeader) -> FrameHeader:
    """Return the header of the answer to a dispatch."""
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    sizes = ("num_tokens", "num_pairs", "latent_size", "wire_dtype", "combine")
    fields["kind"] = FrameKind.COMBINE
    fields["payload_bytes"] = combine_payload_bytes(**{name: fields[name] for name in sizes})
    return FrameHeader(**fields)


def receive(link: Link, waiter: Waiter) -> Frame:
    """Return the next frame, pushing what is queued."""
    while True:
        waiter.watch(link.fileno(), for_reading=True, for_writing=link.unsent_bytes > 0)
        for _, events in waiter.wait(time.monotonic() + TIMEOUT_S):
            if events & select.POLLOUT:
                link.flush()
            frame = link.try_receive() if events & ~select.POLLOUT else None
            if frame is not None:
                return frame


def measure(case: Case, *, is_router: bool) -> Result:
    """Return the times of one case."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        target = run_worker if is_router else run_echo
        child = context.Process(target=target, args=(folder, case, far))
        child.start()
        info = ExpertWorkerInfo(WORKER, *near.recv())
        times_us = time_router(case, info) if is_router else time_frames(case, info)
        near.send(None)
        child.join()
    sent = case.header
    sizes = tuple(HEADER_BYTES + h.payload_bytes for h in (sent, answer_header(sent)))
    return Result(
        measure="router" if is_router else "frames",
        shape=case.shape.name,
        transport=case.transport,
        combine=case.combine.value,
        median_us=statistics.median(times_us),
        p10_us=float(np.percentile(times_us, 10)),
        p90_us=float(np.percentile(times_us, 90)),
        p99_us=float(np.percentile(times_us, 99)),
        bytes_out=sizes[0],
        bytes_in=sizes[1],
        copy_us=time_copies(sizes, repeats=case.repeats),
    )


def time_router(case: Case, info: ExpertWorkerInfo) -> list[float]:
    """Return microseconds from `begin` to the sum, one per repeat; a quarter more warms up."""
    shape = case.shape
    router = LatentRouter(worker=WorkerId("attention-1"), settings=case.settings)
    router.connect(Membership(Generation(1), (info,)))
    router.set_placement(
        plan_initial_placement(
            moe_layers=(LAYER,), num_experts=shape.num_experts, workers=(WORKER,)
        )
    )
    generator = torch.Generator().manual_seed(1)
    z_TL = torch.randn(shape.num_tokens, shape.latent_size, generator=generator).bfloat16()
    scores = torch.rand(shape.num_tokens, shape.num_experts, generator=generator)
    ids_TK = scores.topk(shape.num_picks).indices
    weights_TK = torch.full(ids_TK.shape, 1.0 / shape.num_picks)
    times_us = []
    with torch.inference_mode():
        for step in range(case.repeats + case.repeats // 4):
            lane = router.lane(step=step, lane=0)
            started = time.perf_counter()
            lane.finish(lane.begin(LAYER, z_TL, ids_TK, weights_TK))
            times_us.append((time.perf_counter() - started) * 1e6)
    router.close()
    return times_us[-case.repeats :]


def time_frames(case: Case, info: ExpertWorkerInfo) -> list[float]:
    """Return microseconds for a frame out and a frame in, copied out of the link's memory."""
    link = connect(
        info.addresses[0],
        Hello(worker=WorkerId("attention-1"), generation=Generation(1)),
        deadline=time.monotonic() + TIMEOUT_S,
        shm_bytes=case.settings.shm_bytes,
    )
    waiter = Waiter(spin_s=case.settings.spin_s)
    waiter.add(link.fileno())
    header = case.header
    payload = np.ones(header.payload_bytes, np.uint8)
    target = np.empty(answer_header(header).payload_bytes, np.uint8)
    times_us = []
    for _ in range(case.repeats + case.repeats // 4):
        started = time.perf_counter()
        link.send(header, (payload,), deadline=time.monotonic() + TIMEOUT_S)
        frame = receive(link, waiter)
        np.copyto(target, frame.payload)
        link.release(frame)
        times_us.append((time.perf_counter() - started) * 1e6)
    link.close()
    return times_us[-case.repeats :]


def time_copies(sizes: tuple[int, ...], *, repeats: int) -> float:
    """Return the median microseconds for copying arrays of these sizes."""
    pairs = [(np.ones(size, np.uint8), np.empty(size, np.uint8)) for size in sizes]
    times_us = []
    for _ in range(repeats):
        started = time.perf_counter()
        for source, target in pairs:
            np.copyto(target, source)
        times_us.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times_us)


def format_table(results: list[Result]) -> str:
    """Return a Markdown table."""
    columns = ["measure", "shape", "transport", "combine", "median us", "p10", "p90", "p99"]
    columns += ["bytes out", "bytes in", "copy of the bytes us"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in results:
        times = (r.median_us, r.p10_us, r.p90_us, r.p99_us)
        cells = [r.measure, r.shape, r.transport, r.combine, *(f"{t:.1f}" for t in times)]
        cells += [str(r.bytes_out), str(r.bytes_in), f"{r.copy_us:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write_report(results: list[Result], command: str, folder: Path, notes: str) -> Path:
    """Write the result file of today and return its path."""
    day = datetime.now(UTC).strftime("%Y%m%d")
    path = folder / f"dispatch_roundtrip_{hardware_name()}_{day}.md"
    load = os.getloadavg()
    shapes = "\n".join(f"- {shape.name}: {asdict(shape)}" for shape in SHAPES)
    path.write_text(
        f"# Dispatch and combine round trip, expert compute left out\n\n"
        f"Machine: {hardware_name()}, {psutil.virtual_memory().total >> 30} GiB, "
        f"{platform.system()} {platform.release()}.\n"
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {np.__version__}; one thread per process, bfloat16 latents and wire.\n"
        f"Load of the machine over the last minute (1 and 5): {load[0]:.1f} and {load[1]:.1f}.\n"
        f"Command: `{command}`\n\n{format_table(results)}\n\n{shapes}\n\n{notes}\n"
    )
    return path


NOTES = """`router`: from `begin` to the float32 sum in the caller's hands: listing the pairs,
planning, sending, the other process's receiving, checking and answering, and the weighted sum. The
experts' answers lie ready. `presum`: the other process adds the weighted answers. `frames`: the
same frames through the same links and out of their memory, without router and expert worker. Both
processes poll while they wait. The last column copies the bytes of dispatch and answer once, warm,
in one process."""


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3000, help="timed round trips per case")
    parser.add_argument("--transports", default="shm,tcp", help="comma-separated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--results", type=Path, help="folder for the result file; none: no file")
    parser.add_argument("--pin", action="store_true", help="a core of its own for each process")
    options = parser.parse_args()
    results = []
    for shape in SHAPES:
        repeats = max(20, options.repeats // (1 if shape.name == "small" else 20))
        for transport in options.transports.split(","):
            for combine in Combine:
                case = Case(shape, transport, combine, repeats, options.pin)
                prepare_process(case, core=0)
                results += [measure(case, is_router=is_router) for is_router in (False, True)]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(format_table(results))
    if options.results is not None:
        command = "python -m benchmarks.dispatch_roundtrip " + " ".join(sys.argv[1:])
        print(write_report(results, command, options.results, NOTES), file=sys.stderr)


if __name__ == "__main__":
    main()
