"""The one place that reads or writes environment variables.

Everything else of Latentmesh takes values. Only variables that others define are touched: Ray's
own, and `TMPDIR` through the standard library. What a user has set is never replaced.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
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


def _set_defaults(variables: MutableMapping[str, str], defaults: Mapping[str, str]) -> None:
    for name, value in defaults.items():
        variables.setdefault(name, value)
