"""The `latentmesh` command. One file per group of commands; `app` is the entry point."""

from cluster.cli.app import main

__all__ = ["main"]
