"""What `numerics: invariant` costs: prefill and decode time over those of `fast`, in one run.

One process, one thread, the whole path from prompt to token but for the wire. The two modes take
turns, so that a busy machine slows both. See `benchmarks/README.md`.

    .venv/bin/python benchmarks/numerics_cost.py [--json] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from actors.single_process import SingleProcess, SingleProcessSettings
from configs.numerics import Numerics
from model.checkpoint import Checkpoint
from model.checkpoint_spec import CheckpointSpec, demo_dims
from model.checkpoint_writer import write_checkpoint
from model.dims import ModelDims

NUM_PROMPT = 256
NUM_OUTPUT = 24


@dataclass(frozen=True, slots=True)
class Cost:
    """One line of the table. Medians of seconds."""

    shape: str
    prefill_fast_s: float
    """A prompt of `NUM_PROMPT` tokens to its first token."""
    prefill_invariant_s: float
    decode_fast_s: float
    """One further token, alone in its batch."""
    decode_invariant_s: float

    @property
    def prefill_ratio(self) -> float:
        """Invariant over fast."""
        return self.prefill_invariant_s / self.prefill_fast_s

    @property
    def decode_ratio(self) -> float:
        """Invariant over fast."""
        return self.decode_invariant_s / self.decode_fast_s


def wide_dims() -> ModelDims:
    """The demo's layers at four times the width, where products weigh more than call overhead."""
    small = demo_dims()
    return replace(
        small,
        hidden_size=512,
        dense_hidden_size=1024,
        kda=replace(small.kda, num_heads=8, head_dim=64),
        mla=replace(small.mla, num_heads=8, q_lora_rank=256, kv_lora_rank=128),
        moe=replace(small.moe, expert_hidden_size=256, latent_size=256),
    )


def measure(name: str, dims: ModelDims, *, repeats: int) -> Cost:
    """Write a checkpoint of the shape and time both modes on it, taking turns."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "checkpoint"
        write_checkpoint(folder, CheckpointSpec(dims=dims), seed=0)
        checkpoint = Checkpoint.open(folder)
        processes = {
            numerics: SingleProcess(
                checkpoint,
                SingleProcessSettings(max_request_tokens=512, numerics=numerics),
            )
            for numerics in Numerics
        }
    prompt = [token % dims.vocab_size for token in range(NUM_PROMPT)]
    times: dict[Numerics, list[tuple[float, float]]] = {numerics: [] for numerics in Numerics}
    for repeat in range(repeats + 1):
        for numerics, process in processes.items():
            usage = process.generate(prompt, max_tokens=NUM_OUTPUT, stop_token_ids=[]).usage
            per_token = (usage.total_s - usage.first_token_s) / (NUM_OUTPUT - 1)
            if repeat > 0:  # the first one warms up
                times[numerics].append((usage.first_token_s, per_token))
    for process in processes.values():
        process.close()
    fast, invariant = (
        [statistics.median(column) for column in zip(*times[numerics], strict=True)]
        for numerics in (Numerics.FAST, Numerics.INVARIANT)
    )
    return Cost(name, fast[0], invariant[0], fast[1], invariant[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--repeats", type=int, default=5, help="runs per mode after one warm-up")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = [
        measure("demo (hidden 128)", demo_dims(), repeats=args.repeats),
        measure("wide (hidden 512)", wide_dims(), repeats=args.repeats),
    ]
    if args.json:
        rows = [
            asdict(c) | {"prefill_ratio": c.prefill_ratio, "decode_ratio": c.decode_ratio}
            for c in costs
        ]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    table = Table(title=f"Cost of invariant numerics, prompt of {NUM_PROMPT} tokens, float32")
    table.add_column("shape")
    for column in ("prefill fast", "invariant", "ratio", "decode fast", "invariant", "ratio"):
        table.add_column(column, justify="right")
    for c in costs:
        table.add_row(
            c.shape,
            f"{c.prefill_fast_s * 1e3:.0f} ms",
            f"{c.prefill_invariant_s * 1e3:.0f} ms",
            f"{c.prefill_ratio:.2f}",
            f"{c.decode_fast_s * 1e3:.1f} ms",
            f"{c.decode_invariant_s * 1e3:.1f} ms",
            f"{c.decode_ratio:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
