"""Keys in Redis: one hash that all clusters of a database share, kept from launch to launch."""

from __future__ import annotations

import msgspec
import redis.asyncio

from cluster.api.access.keys import KeyId, KeyRecord
from cluster.state_store import open_async_client, redis_errors, server_name
from configs.errors import StateStoreError

ACCESS_ROOT = "latentmesh-access:"
"""Not below the root of clusters' states: what is there ends with its cluster."""
_KEYS = f"{ACCESS_ROOT}keys"


class KeyTable:
    """The key records of one Redis database."""

    def __init__(self, client: redis.asyncio.Redis, *, server: str) -> None:
        """Use a client that the caller closes, or `connect`."""
        self._client = client
        self._server = server

    @classmethod
    def connect(cls, url: str) -> KeyTable:
        """Return the table behind a Redis URL; connects on first use.

        Raises:
            ConfigError: The URL cannot be read.
        """
        return cls(open_async_client(url), server=server_name(url))

    async def find(self, key: KeyId) -> KeyRecord | None:
        """See `KeyStore`."""
        with redis_errors(self._server, "read a key"):
            data = await self._client.hget(_KEYS, key)
        return None if data is None else self._parse(data)

    async def read_all(self) -> tuple[KeyRecord, ...]:
        """See `KeyStore`."""
        with redis_errors(self._server, "read keys"):
            values = await self._client.hvals(_KEYS)
        return tuple(sorted(map(self._parse, values), key=lambda record: record.created_at))

    async def put(self, record: KeyRecord) -> None:
        """See `KeyStore`."""
        with redis_errors(self._server, "write a key"):
            await self._client.hset(_KEYS, record.id, msgspec.json.encode(record).decode())

    async def close(self) -> None:
        """See `KeyStore`."""
        await self._client.aclose()

    def _parse(self, data: bytes | str) -> KeyRecord:
        try:
            return msgspec.json.decode(data, type=KeyRecord)
        except msgspec.MsgspecError as exc:
            raise StateStoreError(
                f"state server {self._server} holds a key that was not written by this version: "
                f"{exc}"
            ) from exc
