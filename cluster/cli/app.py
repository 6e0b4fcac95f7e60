"""Entry point of `latentmesh`: finds the command, runs it, turns errors into one line.

Commands are imported when they are called, so that `latentmesh --help` does not load torch and Ray.

Exit codes: 0 done, 1 failed while running, 2 wrong usage or configuration, 130 interrupted.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import Annotated, cast

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from configs.errors import CheckpointError, ConfigError, InvalidRequestError, ServingError

COMMANDS = {
    "serve": ("cluster.cli.serve", "Start a cluster and serve until Ctrl-C."),
    "status": ("cluster.cli.status", "Show the workers of a running cluster."),
    "generate": ("cluster.cli.generate", "Continue a prompt, in this process or on a server."),
    "score": ("cluster.cli.score", "Write the logits of every prompt position."),
    "flush-cache": ("cluster.cli.flush_cache", "Make a running cluster forget cached prefixes."),
    "load": ("cluster.cli.load", "Show which experts of a running cluster have how much load."),
    "keys": ("cluster.cli.keys", "Make, list and take back API keys."),
    "inspect": ("cluster.cli.inspect", "Show parameters, bytes and costs of a checkpoint."),
    "bench": ("cluster.cli.bench", "Measure how well experts are placed."),
    "demo": ("cluster.cli.demo", "Try it: a small cluster, three prompts at once."),
    "init-checkpoint": (
        "cluster.cli.init_checkpoint",
        "Write a small random checkpoint to try out.",
    ),
}

EXIT_FAILED = 1
EXIT_USAGE = 2


class _LazyGroup(TyperGroup):
    """A group whose commands are typer functions, imported by name when one is run."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # same class
        """Names in reading order."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]  # same class
        """Return a command: the real one when it is about to run, else its name and summary."""
        if cmd_name not in COMMANDS:
            return None
        module_name, summary = COMMANDS[cmd_name]
        if ctx.resilient_parsing or cmd_name not in ctx.meta.get(_WANTED, ()):
            return TyperCommand(name=cmd_name, short_help=summary, help=summary)
        function = getattr(importlib.import_module(module_name), cmd_name.replace("-", "_"))
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name=cmd_name, short_help=summary)(function)
        command = typer.main.get_command(single)
        command.name = cmd_name
        return cast("TyperCommand", command)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # same class
        """Remember the words of the command line: only a command among them is imported."""
        ctx.meta[_WANTED] = frozenset(args)
        return super().parse_args(ctx, args)


_WANTED = "latentmesh.wanted"

app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:  # noqa: FBT001 - typer passes the flag
    if value:
        typer.echo(f"latentmesh {importlib.metadata.version('latentmesh')}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Latentmesh: serve Kimi-K3-class models with attention and experts apart."""


def main(args: list[str] | None = None) -> None:
    """Run a command and exit with its code. Our own errors are one line on standard error."""
    try:
        app(args=args, prog_name="latentmesh")
    except ServingError as exc:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[red]error[/red] \\[{exc.code}]: ", end="")
        console.print(exc.message, markup=False)
        is_usage = isinstance(exc, ConfigError | CheckpointError | InvalidRequestError)
        sys.exit(EXIT_USAGE if is_usage else EXIT_FAILED)
