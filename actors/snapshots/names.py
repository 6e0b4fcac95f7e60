"""Names of copies of requests; the same in a folder and in a vault."""

from __future__ import annotations

import re

from configs.errors import SnapshotError

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,200}")


def check_name(name: str) -> None:
    """Raise `SnapshotError` unless `name` can name a snapshot."""
    if _NAME.fullmatch(name) is None:
        raise SnapshotError(
            f"snapshot name {name[:220]!r} is not 1 to 200 of a-z, A-Z, 0-9, '.', '_' and '-'; "
            "choose another name"
        )


def missing(name: str, where: str) -> SnapshotError:
    """The error for a snapshot that is not there, or not any more."""
    return SnapshotError(f"snapshot {name} is not in {where}; compute the request again")
