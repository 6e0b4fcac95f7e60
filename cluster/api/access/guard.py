"""The door's guard: who calls, whether they may, and how much of it."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NoReturn

import redis.asyncio

from cluster.api.access.credentials import Credentials, Identity
from cluster.api.access.key_cache import KeyCache
from cluster.api.access.key_file import KeyFile
from cluster.api.access.key_table import KeyTable
from cluster.api.access.keys import KeyRecord, KeyStore, Refusal, judge_key, parse_key
from cluster.api.access.limits import Allowance, Exceeded, Limits, LocalLimits
from cluster.api.access.refusals import Refusals
from cluster.api.access.shared_limits import FallbackLimits, SharedLimits
from cluster.api.gateway_settings import AccessSettings
from cluster.state_store import open_async_client, server_name
from cluster.telemetry import Metrics
from configs.errors import (
    ConfigError,
    RateLimitedError,
    ServingError,
    StateStoreError,
    UnauthenticatedError,
)

_HOW: Final = "send it as `authorization: Bearer <key>` or `x-api-key: <key>`"
# What the caller hears. Who does not have the secret hears nothing about the key.
_ANSWERS: Final = {
    Refusal.NO_KEY: f"this server asks for an API key; {_HOW}",
    Refusal.MALFORMED_KEY: "the API key is not of the form lm_<id>_<secret>; send it unchanged",
    Refusal.UNKNOWN_KEY: "the API key is not valid here; ask the operator for one",
    Refusal.WRONG_KEY: "the API key is not valid here; ask the operator for one",
    Refusal.EXPIRED_KEY: "the API key has expired; ask the operator for a new one",
    Refusal.REVOKED_KEY: "the API key was revoked; ask the operator for a new one",
}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where the guard takes the time from."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = lambda: datetime.now(UTC)


class AccessGuard:
    """The guard of one gateway, for both doors. Belongs to one event loop."""

    def __init__(
        self,
        settings: AccessSettings,
        *,
        keys: KeyCache | None,
        limits: Limits,
        refusals: Refusals,
        clocks: Clocks,
    ) -> None:
        """Use `open`."""
        self._settings = settings
        self._keys = keys
        self._limits = limits
        self.refusals = refusals
        self._clocks = clocks
        self._client: redis.asyncio.Redis | None = None

    @classmethod
    def open(
        cls, settings: AccessSettings, metrics: Metrics, clocks: Clocks | None = None
    ) -> AccessGuard:
        """Return a guard. Connects to the state store when it first needs it.

        Raises:
            ConfigError: The key file or the URL of the state store cannot be used.
        """
        times = Clocks() if clocks is None else clocks
        client: redis.asyncio.Redis | None = None
        limits: Limits = LocalLimits(times.monotonic)
        store: KeyStore | None = None
        if settings.state_url is not None:
            client = open_async_client(settings.state_url)
            server = server_name(settings.state_url)
            shared = SharedLimits(client, server=server)
            store = KeyTable(client, server=server)
            limits = shared
            if settings.key_file is not None:
                limits = FallbackLimits(shared, limits, times.monotonic)
        if settings.key_file is not None:
            file = KeyFile(settings.key_file)
            file.check()
            store = file
        guard = cls(
            settings,
            keys=_cache(store, settings, times),
            limits=limits,
            refusals=Refusals(metrics, times.monotonic),
            clocks=times,
        )
        guard._client = client
        return guard

    @asynccontextmanager
    async def enter(self, credentials: Credentials) -> AsyncIterator[Identity]:
        """Let a request in for as long as the block runs.

        Raises:
            UnauthenticatedError: No key, or one that is not good.
            RateLimitedError: The caller's limit is reached; carries when to retry.
            StateStoreError: Whether the caller may cannot be found out.
        """
        identity, allowance = await self._identify(credentials)
        if allowance.is_unlimited:
            yield identity
            return
        try:
            lease = await self._limits.acquire(identity.caller, allowance)
        except StateStoreError as exc:
            self._refuse(credentials, Refusal.LIMITS_UNREADABLE, exc, identity)
        if isinstance(lease, Exceeded):
            self._refuse(credentials, lease.reason, _explain(lease, identity), identity)
        try:
            yield identity
        finally:
            await lease.release()

    async def close(self) -> None:
        """Stop counting and close connections. Idempotent."""
        await self._limits.close()
        if self._keys is not None:
            await self._keys.close()
        if self._client is not None:
            await self._client.aclose()

    async def _identify(self, credentials: Credentials) -> tuple[Identity, Allowance]:
        if self._keys is None:
            return _without_key(credentials), self._allowance(credentials, None)
        record = await self._check_key(credentials, self._keys)
        identity = Identity(caller=f"key:{record.id}", name=record.name, key=record.id)
        return identity, self._allowance(credentials, record)

    async def _check_key(self, credentials: Credentials, keys: KeyCache) -> KeyRecord:
        if credentials.key is None:
            self._turn_away(credentials, Refusal.NO_KEY)
        presented = parse_key(credentials.key)
        if presented is None:
            self._turn_away(credentials, Refusal.MALFORMED_KEY)
        try:
            record = await keys.find(presented.id)
        except StateStoreError as exc:
            _logger.debug("key %s was not looked up", presented.id, exc_info=exc)
            answer = StateStoreError("keys cannot be looked up now; retry")
            self._refuse(credentials, Refusal.KEYS_UNREADABLE, answer, None, why=exc.message)
        reason = judge_key(presented, record, self._clocks.wall())
        if reason is not None or record is None:
            who = f"key {presented.id}" + ("" if record is None else f" ({record.name})")
            self._turn_away(credentials, Refusal.UNKNOWN_KEY if reason is None else reason, who)
        return record

    def _allowance(self, credentials: Credentials, record: KeyRecord | None) -> Allowance:
        if record is None and credentials.certificate is None:
            return Allowance()
        rate, at_once = self._settings.requests_per_minute, self._settings.max_concurrent_requests
        if record is not None:
            own_rate, own_at_once = record.requests_per_minute, record.max_concurrent_requests
            rate = rate if own_rate is None else own_rate
            at_once = at_once if own_at_once is None else own_at_once
        return Allowance(rate, at_once)

    def _turn_away(self, credentials: Credentials, reason: Refusal, who: str = "") -> NoReturn:
        why = f"{credentials.operation}: {reason.value.replace('_', ' ')}"
        self.refusals.note(credentials.door, reason, _describe(credentials, who), why)
        raise UnauthenticatedError(_ANSWERS[reason])

    def _refuse(
        self,
        credentials: Credentials,
        reason: Refusal,
        error: ServingError,
        identity: Identity | None,
        *,
        why: str | None = None,
    ) -> NoReturn:
        who = ""
        if identity is not None and identity.key is not None:
            who = f"key {identity.key} ({identity.name})"
        text = error.message if why is None else why
        self.refusals.note(
            credentials.door,
            reason,
            _describe(credentials, who),
            f"{credentials.operation}: {text}",
        )
        raise error from None


def _cache(store: KeyStore | None, settings: AccessSettings, clocks: Clocks) -> KeyCache | None:
    if not settings.needs_key:
        return None
    if store is None:
        raise ConfigError("keys are asked for, but there is neither a key file nor a state store")
    return KeyCache(store, max_age_s=settings.cache_s, clock=clocks.monotonic)


def _without_key(credentials: Credentials) -> Identity:
    subject = credentials.certificate
    if subject is None:
        return Identity(caller="anonymous", name=credentials.peer)
    # Hashed: a subject may hold any character and be long.
    digest = hashlib.sha256(subject.encode()).hexdigest()[:32]
    return Identity(caller=f"certificate:{digest}", name=subject)


def _describe(credentials: Credentials, who: str) -> str:
    parts = [who] if who else []
    if credentials.certificate is not None:
        parts.append(f"certificate {credentials.certificate}")
    parts.append(f"from {credentials.peer}")
    return " ".join(parts)


def _explain(exceeded: Exceeded, identity: Identity) -> RateLimitedError:
    retry = exceeded.retry_after_s
    if exceeded.reason is Refusal.RATE:
        text = (
            f"{identity.name!r} has begun {exceeded.limit} requests within a minute, which is its "
            f"limit; retry in {retry:.1f} s"
        )
    else:
        text = (
            f"{identity.name!r} has {exceeded.limit} requests running, which is its limit; retry "
            f"when one has ended"
        )
    return RateLimitedError(text, retry_after_s=retry)
