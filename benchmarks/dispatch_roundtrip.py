"""Time of one dispatch and combine between two processes, with the expert compute left out.

The far side is a real `ExpertWorker` whose experts' answers lie ready: frames are received,
checked, merged and answered as in serving, only sorting the rows by expert and the FFN are missing.
The near side is a real `LatentRouter`: plan, send, wait, weighted sum. See `benchmarks/README.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
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
from configs.ids import Epoch, Generation, WorkerId
from configs.numerics import Combine, FloatType
from router.latent_router import LatentRouter
from router.membership import ExpertWorkerInfo, Membership
from router.placement import plan_initial_placement
from router.settings import RouterSettings
from router.transport.connect import TransportKind

WORKER = WorkerId("expert-1")
LAYER = 1


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


def run_worker(folder: str, transport: TransportKind, latent_size: int, pipe: Connection) -> None:
    """Serve until the other end of `pipe` says something."""
    torch.set_num_threads(1)
    worker = ExpertWorker(
        worker=WORKER, compute=NoCompute(latent_size), settings=ExpertWorkerSettings()
    )
    info = worker.listen(directory=Path(folder), host="127.0.0.1", transports=[transport])
    pipe.send((info.addresses, info.host_token))
    stop = threading.Event()
    thread = threading.Thread(target=worker.serve, args=(stop,))
    thread.start()
    pipe.recv()
    stop.set()
    thread.join()
    worker.close()


def measure(shape: Shape, transport: TransportKind, combine: Combine, *, repeats: int) -> Result:
    """Return the times of one case."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = context.Process(target=run_worker, args=(folder, transport, shape.latent_size, far))
        child.start()
        addresses, token = near.recv()
        router = LatentRouter(
            worker=WorkerId("attention-1"),
            settings=RouterSettings(
                latent_size=shape.latent_size,
                wire_dtype=FloatType.BFLOAT16,
                combine=combine,
                transport=transport,
            ),
        )
        try:
            router.connect(Membership(Generation(1), (ExpertWorkerInfo(WORKER, addresses, token),)))
            router.set_placement(
                plan_initial_placement(
                    moe_layers=(LAYER,), num_experts=shape.num_experts, workers=(WORKER,)
                )
            )
            times_us = time_round_trips(router, shape, repeats=repeats)
            counters = router.counters
        finally:
            router.close()
            near.send(None)
            child.join()
    bytes_out = counters.bytes_out // counters.frames_out
    bytes_in = counters.bytes_in // counters.frames_in
    return Result(
        shape=shape.name,
        transport=transport,
        combine=combine.value,
        median_us=statistics.median(times_us),
        p10_us=float(np.percentile(times_us, 10)),
        p90_us=float(np.percentile(times_us, 90)),
        p99_us=float(np.percentile(times_us, 99)),
        bytes_out=bytes_out,
        bytes_in=bytes_in,
        copy_us=time_copies((bytes_out, bytes_in), repeats=repeats),
    )


def time_round_trips(router: LatentRouter, shape: Shape, *, repeats: int) -> list[float]:
    """Return microseconds from `begin` to the sum, one per repeat; a quarter more warms up."""
    generator = torch.Generator().manual_seed(1)
    z_TL = torch.randn(shape.num_tokens, shape.latent_size, generator=generator).bfloat16()
    ids_TK = torch.stack(
        [
            torch.randperm(shape.num_experts, generator=generator)[: shape.num_picks]
            for _ in range(shape.num_tokens)
        ]
    )
    weights_TK = torch.full(ids_TK.shape, 1.0 / shape.num_picks)
    warm_up = repeats // 4
    times_us = []
    with torch.inference_mode():
        for step in range(warm_up + repeats):
            lane = router.lane(step=step, lane=0)
            started = time.perf_counter()
            lane.finish(lane.begin(LAYER, z_TL, ids_TK, weights_TK))
            times_us.append((time.perf_counter() - started) * 1e6)
    return times_us[warm_up:]


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
    columns = ["shape", "transport", "combine", "median us", "p10", "p90", "p99"]
    columns += ["bytes out", "bytes in", "copy of the bytes us"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [
        f"| {r.shape} | {r.transport} | {r.combine} | {r.median_us:.1f} | {r.p10_us:.1f} "
        f"| {r.p90_us:.1f} | {r.p99_us:.1f} | {r.bytes_out} | {r.bytes_in} | {r.copy_us:.1f} |"
        for r in results
    ]
    return "\n".join(lines)


def hardware_name() -> str:
    """Return a short name of this machine for the file name, e.g. `epyc-2cores`."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{model.split()[-1].lower()}-{psutil.cpu_count()}cores"


def write_report(results: list[Result], command: str, folder: Path, notes: str) -> Path:
    """Write the result file of today and return its path."""
    day = datetime.now(UTC).strftime("%Y%m%d")
    path = folder / f"dispatch_roundtrip_{hardware_name()}_{day}.md"
    shapes = "\n".join(f"- {shape.name}: {asdict(shape)}" for shape in SHAPES)
    path.write_text(
        f"# Dispatch and combine round trip, expert compute left out\n\n"
        f"Machine: {hardware_name()}, {psutil.virtual_memory().total >> 30} GiB, "
        f"{platform.system()} {platform.release()}.\n"
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, "
        f"numpy {np.__version__}; one thread per process, bfloat16 latents and wire.\n"
        f"Command: `{command}`\n\n{format_table(results)}\n\n{shapes}\n\n{notes}\n"
    )
    return path


NOTES = """The time runs from `begin` to the float32 sum in the caller's hands: listing the pairs,
planning, sending, the other process's receiving, checking and answering, and the weighted sum. The
experts' answers lie ready. Both processes poll while they wait. `presum`: the other process adds
the weighted answers. The last column copies the bytes of dispatch and answer once, warm, in one
process."""


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3000, help="timed round trips per case")
    parser.add_argument("--transports", default="shm,tcp", help="comma-separated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--results", type=Path, help="folder for the result file; none: no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for shape in SHAPES:
        repeats = max(20, options.repeats // (1 if shape.name == "small" else 20))
        for transport in options.transports.split(","):
            results += [measure(shape, transport, c, repeats=repeats) for c in Combine]
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(format_table(results))
    if options.results is not None:
        command = "python benchmarks/dispatch_roundtrip.py " + " ".join(sys.argv[1:])
        print(write_report(results, command, options.results, NOTES), file=sys.stderr)


if __name__ == "__main__":
    main()
