"""`latentmesh generate`: continue a prompt, computed in this process or on a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console

from actors.request_channel import Usage
from cluster.api.answers import Chunk, Finished
from cluster.api.client import LatentmeshClient
from cluster.api.params import GenerateParams, SamplingParams, StopParams
from cluster.cli.prompt import (
    CheckpointOption,
    ComputeDtypeOption,
    NumericsOption,
    PromptArgument,
    ServerOption,
    TokenIdsOption,
    check_place,
    local_module,
    parse_prompt,
)
from configs.errors import InvariantError
from configs.numerics import FinishReason, FloatType, Numerics

DEFAULT_MAX_TOKENS = 64

OnChunk = Callable[[Chunk], None]


@dataclass
class _Printer:
    """Collects an answer and, unless it is printed as JSON, shows it as it comes."""

    is_silent: bool
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def show(self, chunk: Chunk) -> None:
        """Take one chunk."""
        self.token_ids.extend(chunk.token_ids)
        self.text += chunk.text
        if not self.is_silent and chunk.text:
            sys.stdout.write(_printable(chunk.text) if sys.stdout.isatty() else chunk.text)
            sys.stdout.flush()


def generate(  # noqa: PLR0913 - one parameter per flag
    prompt: PromptArgument = None,
    *,
    token_ids: TokenIdsOption = None,
    checkpoint: CheckpointOption = None,
    server: ServerOption = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus mass, at most 1.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Drawn when not given.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on at end tokens.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds, with --server.")] = None,
    compute_dtype: ComputeDtypeOption = FloatType.FLOAT32,
    numerics: NumericsOption = Numerics.FAST,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Continue a prompt and print the answer as it comes."""
    check_place(checkpoint, server)
    params = GenerateParams(
        prompt=parse_prompt(prompt, token_ids),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        stop=StopParams(ignore_eos=ignore_eos),
    )
    printer = _Printer(is_silent=as_json)
    if server is not None:
        finished = _generate_there(params, server, timeout, printer.show)
    elif checkpoint is not None:
        finished = local_module().generate_here(
            params, checkpoint, compute_dtype, numerics, printer.show
        )
    if as_json:
        typer.echo(json.dumps(_to_json(printer, finished), indent=2))
        return
    if not printer.text:
        sys.stdout.write(",".join(map(str, printer.token_ids)))
    sys.stdout.write("\n")
    _print_summary(printer, finished)


def _generate_there(
    params: GenerateParams, server: str, timeout_s: float | None, on_chunk: OnChunk
) -> Finished:
    finished: Finished | None = None
    with LatentmeshClient(server) as client:
        for event in client.generate(params, timeout_s=timeout_s):
            if isinstance(event, Chunk):
                on_chunk(event)
            else:
                finished = event
    if finished is None:
        raise InvariantError(f"{server} ended the stream without `finished`")
    return finished


def _to_json(printer: _Printer, finished: Finished) -> dict[str, Any]:
    usage, rate = finished.usage, _rate(finished.usage)
    return {
        "token_ids": printer.token_ids,
        "text": printer.text,
        "finish_reason": finished.finish_reason.value,
        "prompt_tokens": usage.prompt_tokens,
        "seed": finished.seed,
        "timings": {
            "queue_s": round(usage.queue_s, 6),
            "first_token_s": round(usage.first_token_s, 6),
            "total_s": round(usage.total_s, 6),
            "tokens_per_s": None if rate is None else round(rate, 3),
        },
    }


def _rate(usage: Usage) -> float | None:
    """Tokens per second after the first; None when there is only one."""
    later_s = usage.total_s - usage.first_token_s
    if usage.output_tokens < 2 or later_s <= 0:
        return None
    return (usage.output_tokens - 1) / later_s


def _print_summary(printer: _Printer, finished: Finished) -> None:
    """One dim line for people, not in pipes."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        return
    usage, rate = finished.usage, _rate(finished.usage)
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    reason = "end token" if finished.finish_reason is FinishReason.STOP else "max_tokens"
    console.print(
        f"[dim]{usage.prompt_tokens} prompt tokens, {len(printer.token_ids)} generated "
        f"({reason}); first after {usage.first_token_s:.3f} s{speed}; seed {finished.seed}[/dim]"
    )


def _printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters become middle dots."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)
