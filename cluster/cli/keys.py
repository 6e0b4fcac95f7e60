"""`latentmesh keys`: make, list and take back the API keys of a cluster."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.table import Table

from cluster.api.access.key_file import KeyFile
from cluster.api.access.key_table import KeyTable
from cluster.api.access.keys import KeyId, KeyRecord, KeyStore, make_key
from cluster.cli.worker_table import make_console
from configs.errors import ConfigError

_SPAN = re.compile(r"([1-9][0-9]{0,6})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}

T = TypeVar("T")


class Action(StrEnum):
    """What to do."""

    CREATE = "create"
    LIST = "list"
    REVOKE = "revoke"


def keys(
    action: Annotated[Action, typer.Argument(help="create NAME, list, or revoke ID.")],
    subject: Annotated[
        str | None, typer.Argument(metavar="[NAME|ID]", help="Of the key; not for list.")
    ] = None,
    *,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="The file that api.auth.key_file names.")
    ] = None,
    state_url: Annotated[
        str | None, typer.Option("--state-url", help="The Redis URL that state.url names.")
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option("--expires-in", metavar="SPAN", help="Lifetime: 30m, 12h, 90d.")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option("--requests-per-minute", min=1, help="Limit of this key.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option("--max-concurrent", min=1, help="Requests at once, at most.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Manage API keys in a file or in Redis. A key is shown once, when it is made."""
    store = _open(key_file, state_url)
    match action:
        case Action.CREATE:
            text, record = make_key(
                _needed(subject, "NAME"),
                now=datetime.now(UTC),
                lifetime=_read_span(expires_in),
                requests_per_minute=requests_per_minute,
                max_concurrent_requests=max_concurrent,
            )
            _run(store, lambda: store.put(record))
            _show_new(text, record, as_json=as_json)
        case Action.LIST:
            _show_all(_run(store, store.read_all), as_json=as_json)
        case Action.REVOKE:
            key = KeyId(_needed(subject, "ID"))
            _run(store, lambda: _revoke(store, key))
            typer.echo(json.dumps({"revoked": key}) if as_json else f"revoked {key}")


def _open(key_file: Path | None, state_url: str | None) -> KeyStore:
    if (key_file is None) == (state_url is None):
        raise ConfigError(
            "give exactly one of --key-file (api.auth.key_file) and --state-url (state.url)"
        )
    if key_file is not None:
        return KeyFile(key_file)
    return KeyTable.connect(str(state_url))


def _needed(subject: str | None, what: str) -> str:
    if subject is None:
        raise ConfigError(f"{what} is missing: latentmesh keys ACTION {what}")
    return subject


def _read_span(text: str | None) -> timedelta | None:
    if text is None:
        return None
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ConfigError(f"--expires-in is {text!r}; expected a number with m, h or d, e.g. 90d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def _run(store: KeyStore, work: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        try:
            return await work()
        finally:
            await store.close()

    return asyncio.run(run())


async def _revoke(store: KeyStore, key: KeyId) -> None:
    record = await store.find(key)
    if record is None:
        raise ConfigError(f"there is no key with id {key!r}; `latentmesh keys list` shows all")
    await store.put(record.as_revoked())


def _show_new(text: str, record: KeyRecord, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"key": text, **_describe(record)}))
        return
    typer.echo(f"key {record.id} of {record.name!r}; it is shown this once:", err=True)
    typer.echo(text)


def _show_all(records: tuple[KeyRecord, ...], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([_describe(record) for record in records], indent=2))
        return
    table = Table("id", "name", "made", "expires", "state", "per minute", "at once")
    now = datetime.now(UTC)
    for record in records:
        shown = _describe(record)
        is_over = record.expires_at is not None and now >= record.expires_at
        state = "revoked" if record.revoked else "expired" if is_over else "good"
        limits = (record.requests_per_minute, record.max_concurrent_requests)
        table.add_row(
            record.id,
            record.name,
            str(shown["created_at"]),
            str(shown["expires_at"] or "never"),
            state,
            *("" if limit is None else str(limit) for limit in limits),
        )
    make_console(sys.stdout).print(table)


def _describe(record: KeyRecord) -> dict[str, object]:
    """Everything but the hash."""
    return {
        "id": record.id,
        "name": record.name,
        "created_at": f"{record.created_at:%Y-%m-%d %H:%M}",
        "expires_at": None if record.expires_at is None else f"{record.expires_at:%Y-%m-%d %H:%M}",
        "revoked": record.revoked,
        "requests_per_minute": record.requests_per_minute,
        "max_concurrent_requests": record.max_concurrent_requests,
    }
