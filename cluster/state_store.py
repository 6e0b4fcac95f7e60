"""Durable state of a cluster in Redis or Valkey: who it is, its members, where experts live.

All keys are under `latentmesh:<cluster id>:`. Every write names a fencing token; the server refuses
one lower than the highest it has seen, so that a controller that was replaced can write no more.
Check and write are one Lua script, hence atomic. Reads are never refused.

Calls block, each for at most `TIMEOUT_S`; the object may be used from several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, NewType, TypeVar
from urllib.parse import urlsplit

import msgspec
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from configs.errors import ConfigError, StateStoreError
from configs.ids import ClusterId, WorkerId
from router.membership import Membership
from router.placement import LayerPlacement, Placement

FencingToken = NewType("FencingToken", int)
"""Grows with every controller of a cluster; the writer with the highest one wins."""

KEY_ROOT: Final = "latentmesh:"
TIMEOUT_S: Final = 5.0

# KEYS[1] the fence; ARGV[1] the token; ARGV[2] a JSON list of commands to run when it is not lower.
_FENCED_WRITE: Final = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
local mine = tonumber(ARGV[1])
if mine < held then return held end
if mine > held then redis.call('SET', KEYS[1], mine) end
for _, command in ipairs(cjson.decode(ARGV[2])) do redis.call(unpack(command)) end
return -1
"""
# KEYS[1] the fence; ARGV[1] a token that was seen elsewhere. Returns a new one above both.
_ACQUIRE: Final = """
local held = tonumber(redis.call('GET', KEYS[1]) or '0')
local token = math.max(held, tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], token)
return token
"""
_WRITTEN: Final = -1


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """Who a cluster is. Written once at its start."""

    cluster: ClusterId
    version: str
    """Of the software."""
    config_json: str
    """The resolved configuration, secrets left out."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as its launch knows it."""

    worker: WorkerId
    role: Literal["attention", "expert"]
    actor: str
    """Name of its Ray actor."""
    node_id: str
    pid: int
    addresses: tuple[str, ...]
    """Request channel of an attention worker, or data-plane listeners of an expert worker."""


class StateStore:
    """The state of one cluster behind a Redis URL."""

    def __init__(self, client: redis.Redis, *, cluster: ClusterId, server: str) -> None:
        self._client = client
        self._prefix = f"{KEY_ROOT}{cluster}:"
        self._cluster = cluster
        self._server = server
        self._fenced_write = client.register_script(_FENCED_WRITE)
        self._acquire = client.register_script(_ACQUIRE)

    @classmethod
    def connect(cls, url: str, cluster: ClusterId) -> StateStore:
        """Connect and check that the server answers.

        Args:
            url: `redis://`, `rediss://` or `unix://`, with a password where needed.
            cluster: Whose state.

        Raises:
            ConfigError: The URL cannot be read.
            StateStoreError: The server does not answer. Passwords are never in the message.
        """
        server = server_name(url)
        try:
            client = redis.Redis.from_url(
                url,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError as exc:
            raise ConfigError(f"state.url with server {server} cannot be read: {exc}") from None
        store = cls(client, cluster=cluster, server=server)
        with redis_errors(server, "ping"):
            client.ping()
        return store

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._client.close()

    def acquire_token(self, *, at_least: FencingToken = FencingToken(0)) -> FencingToken:
        """Return a token above every one that this store and the caller have seen."""
        with redis_errors(self._server, "acquire a fencing token"):
            return FencingToken(int(self._acquire(keys=[self._key("fence")], args=[at_least])))

    def write_cluster(self, record: ClusterRecord, *, token: FencingToken) -> None:
        """Write who this cluster is."""
        self._write(token, [["SET", self._key("cluster"), _to_json(record)]])

    def write_membership(self, membership: Membership, *, token: FencingToken) -> None:
        """Write the membership of a generation."""
        self._write(token, [["SET", self._key("membership"), _to_json(membership)]])

    def write_layers(self, layers: Sequence[LayerPlacement], *, token: FencingToken) -> None:
        """Write the placement of some layers together; others stay as they are."""
        key = self._key("placement")
        self._write(
            token, [["HSET", key, str(placed.layer), _to_json(placed)] for placed in layers]
        )

    def write_workers(self, workers: Sequence[WorkerRecord], *, token: FencingToken) -> None:
        """Write or replace some workers; others stay."""
        key = self._key("workers")
        self._write(token, [["HSET", key, worker.worker, _to_json(worker)] for worker in workers])

    def remove_worker(self, worker: WorkerId, *, token: FencingToken) -> None:
        """Forget a worker; nothing happens when it is unknown."""
        self._write(token, [["HDEL", self._key("workers"), worker]])

    def remove_cluster(self, *, token: FencingToken) -> None:
        """Delete everything of this cluster but its fence, which keeps late writers out."""
        names = ("cluster", "membership", "placement", "workers")
        self._write(token, [["DEL", *(self._key(name) for name in names)]])

    def read_cluster(self) -> ClusterRecord:
        """Return who this cluster is. Raises `StateStoreError` where nothing was written."""
        return _from_json(self._read("cluster"), ClusterRecord)

    def read_membership(self) -> Membership:
        """Return the membership. Raises `StateStoreError` where nothing was written."""
        return _from_json(self._read("membership"), Membership)

    def read_placement(self) -> Placement:
        """Return the placement of all layers, by layer; empty where nothing was written."""
        layers = [_from_json(data, LayerPlacement) for data in self._read_hash("placement")]
        return Placement(layers=tuple(sorted(layers, key=lambda placed: placed.layer)))

    def read_workers(self) -> tuple[WorkerRecord, ...]:
        """Return all workers, attention workers first, in the order of their numbers."""
        workers = [_from_json(data, WorkerRecord) for data in self._read_hash("workers")]
        return tuple(sorted(workers, key=lambda record: (record.role, _number(record.worker))))

    def forget_other_clusters(self) -> int:
        """Delete the keys of every other cluster and return their number.

        Only for a server that belongs to this cluster alone: the embedded one, whose data folder is
        locked, so that every other cluster in it is dead.
        """
        with redis_errors(self._server, "forget dead clusters"):
            keys = [
                key
                for key in self._client.scan_iter(match=f"{KEY_ROOT}*", count=1000)
                if not key.startswith(self._prefix.encode())
            ]
            if keys:
                self._client.delete(*keys)
            return len(keys)

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _write(self, token: FencingToken, commands: list[list[str]]) -> None:
        if not commands:
            return
        body = msgspec.json.encode(commands)
        with redis_errors(self._server, "write"):
            held = int(self._fenced_write(keys=[self._key("fence")], args=[token, body]))
        if held != _WRITTEN:
            raise StateStoreError(
                f"state server {self._server} refused a write to cluster {self._cluster}: fencing "
                f"token {token} is below {held}; another controller has taken over"
            )

    def _read(self, name: str) -> bytes:
        with redis_errors(self._server, f"read {name}"):
            data: Any = self._client.get(self._key(name))
        if data is None:
            raise StateStoreError(
                f"state server {self._server} holds no {name} of cluster {self._cluster}"
            )
        return bytes(data)

    def _read_hash(self, name: str) -> list[bytes]:
        with redis_errors(self._server, f"read {name}"):
            values: Any = self._client.hvals(self._key(name))
        return list(values)


@contextmanager
def redis_errors(server: str, what: str) -> Iterator[None]:
    """Raise what redis-py raises as `StateStoreError`, without passwords."""
    try:
        yield
    except redis.RedisError as exc:
        raise StateStoreError(
            f"state server {server} failed to {what}: {type(exc).__name__}; "
            f"check that it runs and that state.url is right"
        ) from exc


def open_async_client(url: str) -> redis.asyncio.Redis:
    """Return a client for the event loop. Connects on first use; wrap calls in `redis_errors`.

    Raises:
        ConfigError: The URL cannot be read.
    """
    try:
        return redis.asyncio.Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=AsyncRetry(NoBackoff(), 1),
        )
    except ValueError as exc:
        raise ConfigError(
            f"state.url with server {server_name(url)} cannot be read: {exc}"
        ) from None


def server_name(url: str) -> str:
    """Return host and port, or the socket, of a URL: what may be logged."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    try:
        port = parts.port
    except ValueError:
        return "(unreadable)"
    return f"{parts.hostname}" if port is None else f"{parts.hostname}:{port}"


_Value = TypeVar("_Value")


def _to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _from_json(data: bytes, kind: type[_Value]) -> _Value:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as exc:
        raise StateStoreError(
            f"the stored {kind.__name__} was not written by this version: {exc}"
        ) from exc


def _number(worker: WorkerId) -> tuple[int, str]:
    """`expert-10` comes after `expert-9`."""
    _, _, tail = worker.rpartition("-")
    return (int(tail), worker) if tail.isdecimal() else (0, worker)
