"""What a caller shows at the door, and who it turns out to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.api.access.keys import KeyId
from cluster.api.access.refusals import Door

KEY_HEADER = "x-api-key"
AUTHORIZATION_HEADER = "authorization"
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Credentials:
    """What came with a request. The key is not shown by `repr`."""

    door: Door
    peer: str
    """Address of the other end."""
    operation: str
    """Method or path that is asked for."""
    key: str | None = field(default=None, repr=False)
    certificate: str | None = None
    """Subject of the client certificate that the handshake verified."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a caller is."""

    caller: str
    """Unique name that limits count by: `key:<id>`, `certificate:<subject>`, or `anonymous`."""
    name: str
    """For people: the key's name, the subject, or the peer."""
    key: KeyId | None = None


def find_key(headers: Iterable[tuple[str, str]]) -> str | None:
    """Return the key in headers or metadata: of `x-api-key`, else of `authorization: Bearer`.

    Args:
        headers: Names in lower case, with values.
    """
    bearer: str | None = None
    for name, value in headers:
        if name == KEY_HEADER:
            return value.strip()
        if name == AUTHORIZATION_HEADER and value[: len(_BEARER)].lower() == _BEARER:
            bearer = value[len(_BEARER) :].strip()
    return bearer
