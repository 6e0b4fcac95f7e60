"""`latentmesh demo`: a cluster on a small random checkpoint and three prompts at once.

Starts `latentmesh serve` as a user would, talks to it through gRPC as a client would.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.api.answers import Chunk, Finished
from cluster.api.client import LatentmeshClient
from cluster.api.params import GenerateParams, SamplingParams, StopParams
from cluster.api.topology import TopologyView
from configs.errors import ServingError, WorkerError
from model.checkpoint_spec import CheckpointSpec
from model.checkpoint_writer import write_checkpoint

PROMPTS = (
    "Why do experts live apart from attention?",
    "Count to ten in latent space.",
    "What is a placement epoch?",
)
MAX_TOKENS = 96
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
FULL_WIDTH_BYTES_PER_VALUE = 4
"""The demo's wire type is float32; the comparison uses the same."""


@dataclass
class _Answer:
    """One prompt's stream, filled by its thread."""

    prompt: str
    text: str = ""
    num_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    error: ServingError | None = None
    is_done: threading.Event = field(default_factory=threading.Event)


def demo(
    *,
    once: Annotated[bool, typer.Option("--once", help="End after the table.")] = False,
    data_dir: Annotated[Path, typer.Option(help="Folder for checkpoint, state and logs.")] = Path(
        "demo-data"
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = MAX_TOKENS,
) -> None:
    """Start 1 attention and 2 expert workers on a small random checkpoint and stream three answers.

    The weights are random, so the answers are noise; what is real is everything else.
    """
    console = Console()
    checkpoint = data_dir / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, CheckpointSpec(), seed=0)
        console.print(f"wrote a random checkpoint to {checkpoint}; what it says is noise")
    with _serving(console, checkpoint, data_dir) as ready:
        with LatentmeshClient(ready["grpc"]) as client:
            before = client.topology()
            answers = _stream_all(console, client, max_tokens)
            after = client.topology()
        console.print(_answer_table(answers))
        console.print(_work_table(before, after))
        failed = [answer for answer in answers if answer.error is not None]
        if not once:
            _print_next_steps(console, ready)
            _wait_for_interrupt()
        console.print("stopping the cluster")
    console.print("stopped")
    if failed:
        raise typer.Exit(1)


@contextmanager
def _serving(console: Console, checkpoint: Path, data_dir: Path) -> Iterator[dict[str, Any]]:
    """Run `latentmesh serve` while the block runs; yields its ready record."""
    ready_file = data_dir / "demo-ready.json"
    ready_file.unlink(missing_ok=True)
    log = data_dir / "serve.log"
    command = [
        sys.executable,
        "-m",
        "cluster.cli",
        "serve",
        "--checkpoint",
        str(checkpoint),
        "--ready-file",
        str(ready_file),
        "--set",
        f"data_dir={data_dir / 'cluster'}",
    ]
    with log.open("w", encoding="utf-8") as output:
        # A session of its own: Ctrl-C reaches this process alone, which then ends the server.
        server = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            label = "starting Ray, 1 attention worker, 2 expert workers and the gateway"
            if not console.is_terminal:
                console.print(label)
            started = time.monotonic()
            with console.status(label):
                _wait_for_file(server, ready_file, log)
            console.print(f"cluster ready after {time.monotonic() - started:.1f} s")
            yield json.loads(ready_file.read_text(encoding="utf-8"))
        finally:
            _end(server)


def _wait_for_file(server: subprocess.Popen[bytes], ready_file: Path, log: Path) -> None:
    """Wait until the server has written its ready record, or raise with what it said."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready_file.exists():
        try:
            server.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            reason = f"was not ready after {START_TIMEOUT_S:.0f} s"
        else:
            reason = f"ended with code {server.returncode} while starting"
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise WorkerError(f"the server {reason}; the end of {log}:\n{tail}")


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is not None:
        return
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _print_next_steps(console: Console, ready: dict[str, Any]) -> None:
    console.print("still serving; Ctrl-C ends it. Meanwhile, from another terminal:")
    console.print(f"  .venv/bin/latentmesh status --server {ready['grpc']}", soft_wrap=True)
    console.print(
        f'  .venv/bin/latentmesh generate "Hello" --server {ready["grpc"]}', soft_wrap=True
    )
    console.print(f"  curl http://{ready['http']}/metrics", soft_wrap=True)
    if ready["dashboard"]:
        console.print(f"  Ray dashboard: {ready['dashboard']}", soft_wrap=True)


def _wait_for_interrupt() -> None:
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return


def _stream_all(console: Console, client: LatentmeshClient, max_tokens: int) -> list[_Answer]:
    """Send all prompts at once and show the answers growing side by side."""
    answers = [_Answer(prompt) for prompt in PROMPTS]
    for answer in answers:
        threading.Thread(
            target=_stream, args=(client, answer, max_tokens), name="demo-prompt", daemon=True
        ).start()
    with Live(console=console, refresh_per_second=12) as live:
        for answer in answers:
            while not answer.is_done.wait(timeout=0.1):
                live.update(_panels(answers, console.width))
        live.update(_panels(answers, console.width))
    return answers


def _stream(client: LatentmeshClient, answer: _Answer, max_tokens: int) -> None:
    started = time.monotonic()
    params = GenerateParams(
        prompt=answer.prompt,
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.8, seed=7),
        stop=StopParams(ignore_eos=True),
    )
    try:
        for event in client.generate(params, timeout_s=120.0):
            if isinstance(event, Chunk):
                if answer.num_tokens == 0:
                    answer.first_token_s = time.monotonic() - started
                answer.num_tokens += len(event.token_ids)
                answer.text += event.text
            elif isinstance(event, Finished):
                answer.total_s = time.monotonic() - started
    except ServingError as exc:
        answer.error = exc
    finally:
        answer.is_done.set()


def _panels(answers: list[_Answer], width: int) -> Group:
    panels = []
    for answer in answers:
        # Random weights say control characters too; they must not reach the terminal.
        shown = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in answer.text)
        body = (
            Text(shown, overflow="fold")
            if answer.error is None
            else Text(answer.error.message, style="red", overflow="fold")
        )
        panels.append(
            Panel(body, title=Text(answer.prompt), subtitle=f"{answer.num_tokens} tokens", height=9)
        )
    return Group(Columns(panels, width=max(24, width // len(panels) - 1), expand=False))


def _answer_table(answers: list[_Answer]) -> Table:
    table = Table(title="Speed", title_justify="left")
    table.add_column("prompt")
    for column in ("tokens", "time to first token", "tokens/s after it"):
        table.add_column(column, justify="right")
    for answer in answers:
        later_s = answer.total_s - answer.first_token_s
        rate = (answer.num_tokens - 1) / later_s if later_s > 0 else 0.0
        table.add_row(
            answer.prompt, str(answer.num_tokens), f"{answer.first_token_s:.3f} s", f"{rate:.1f}"
        )
    return table


def _work_table(before: TopologyView, after: TopologyView) -> Table:
    """What the answers cost: the counters' difference over the run."""
    table = Table(title="Work", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for old, new in zip(before.expert_workers, after.expert_workers, strict=True):
        pairs = new.pairs - old.pairs
        reads = new.weight_reads - old.weight_reads
        table.add_row(f"(token, expert) pairs on {new.name}", f"{pairs:,}")
        table.add_row(
            f"tokens per expert-weight read on {new.name}", f"{pairs / max(reads, 1):.2f}"
        )
    latent_bytes = _grown(before, after, "latent_bytes_sent")
    latents = _grown(before, after, "latents_sent")
    full_width = latents * after.model.hidden_size * FULL_WIDTH_BYTES_PER_VALUE
    table.add_row("latent bytes sent to expert workers", f"{latent_bytes:,}")
    table.add_row("the same at full width would have been", f"{full_width:,}")
    table.add_row(
        "all bytes sent, with headers and pairs", f"{_grown(before, after, 'wire_bytes_sent'):,}"
    )
    table.add_row("all bytes received", f"{_grown(before, after, 'wire_bytes_received'):,}")
    return table


def _grown(before: TopologyView, after: TopologyView, counter: str) -> int:
    """Growth of a counter over all attention workers."""
    return sum(int(getattr(worker, counter)) for worker in after.attention_workers) - sum(
        int(getattr(worker, counter)) for worker in before.attention_workers
    )
