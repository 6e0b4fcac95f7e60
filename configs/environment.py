"""The one place that reads or writes environment variables.

Everything else of Latentmesh takes values. Ray's variables and, through the standard library,
`TMPDIR` are touched; what a user has set is never replaced. `LATENTMESH_*` say what commands show
to a server.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from configs.errors import ConfigError

RAY_PRIVATE_DEFAULTS = {
    # Token authentication, Ray's default for new clusters, writes a token into the home folder and
    # asks the dashboard's user for it. Whoever shares the network with others sets it to `token`.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
RAY_ATTACH_DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0"}

_RAY_AUTH_MODES = ("disabled", "token")


def prepare_for_private_ray(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set Ray's variables for a cluster that this process starts; its processes inherit them.

    Raises:
        ConfigError: `RAY_AUTH_MODE` is set to something that Ray does not know.
    """
    _set_defaults(variables, RAY_PRIVATE_DEFAULTS)
    mode = variables["RAY_AUTH_MODE"]
    if mode.lower() not in _RAY_AUTH_MODES:
        raise ConfigError(
            f"environment variable RAY_AUTH_MODE is {mode!r}, allowed are "
            f"{' and '.join(_RAY_AUTH_MODES)}"
        )


def prepare_for_attached_ray(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set Ray's variables for joining a running cluster; authentication is the user's choice."""
    _set_defaults(variables, RAY_ATTACH_DEFAULTS)


def temporary_folder() -> Path:
    """Folder for short-lived files: `TMPDIR` where it is set, else the system's."""
    return Path(tempfile.gettempdir())


def use_temporary_folder(folder: Path, variables: MutableMapping[str, str] = os.environ) -> None:
    """Let processes that are started from now on keep their short-lived files in `folder`.

    Ray's leave some behind when they are ended; what is in a folder of ours is removed with it.
    """
    variables["TMPDIR"] = str(folder)


@dataclass(frozen=True, slots=True)
class ClientVariables:
    """What commands show to a server; None is unset."""

    api_key: str | None = field(default=None, repr=False)
    """`LATENTMESH_API_KEY`."""
    ca: Path | None = None
    """`LATENTMESH_CA`: PEM file of who signed the server's certificate."""
    certificate: Path | None = None
    """`LATENTMESH_CERTIFICATE`: PEM file of the client's own."""
    private_key: Path | None = None
    """`LATENTMESH_PRIVATE_KEY`: PEM file of its key."""


def client_variables(variables: Mapping[str, str] = os.environ) -> ClientVariables:
    """Return what commands show to a server."""

    def path_of(name: str) -> Path | None:
        text = variables.get(name)
        return Path(text) if text else None

    return ClientVariables(
        api_key=variables.get("LATENTMESH_API_KEY") or None,
        ca=path_of("LATENTMESH_CA"),
        certificate=path_of("LATENTMESH_CERTIFICATE"),
        private_key=path_of("LATENTMESH_PRIVATE_KEY"),
    )


def _set_defaults(variables: MutableMapping[str, str], defaults: Mapping[str, str]) -> None:
    for name, value in defaults.items():
        variables.setdefault(name, value)
