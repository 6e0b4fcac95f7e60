"""API keys: how they are made, what is stored of them, and whether one is good.

A key is `lm_<id>_<secret>`: the id finds the record, the secret is 256 random bits. Stored is the
SHA-256 of the secret. A slow password hash would add nothing: it protects secrets that can be
guessed, and nobody guesses one of 2**256; a fast one lets every request be checked.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, NewType, Protocol

from configs.errors import ConfigError

KeyId = NewType("KeyId", str)
"""Names a key in records and logs; public."""

MAX_NAME_CHARACTERS: Final = 64
_KEY: Final = re.compile(r"lm_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@/-]*")


class Refusal(StrEnum):
    """Why a caller was turned away. Label values of the metric."""

    NO_KEY = "no_key"
    MALFORMED_KEY = "malformed_key"
    UNKNOWN_KEY = "unknown_key"
    WRONG_KEY = "wrong_key"
    EXPIRED_KEY = "expired_key"
    REVOKED_KEY = "revoked_key"
    KEYS_UNREADABLE = "keys_unreadable"
    RATE = "rate"
    CONCURRENCY = "concurrency"
    LIMITS_UNREADABLE = "limits_unreadable"
    HANDSHAKE = "handshake"
    SLOW_CLIENT = "slow_client"
    LARGE_HEAD = "large_head"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is stored of a key."""

    id: KeyId
    name: str
    hash: str
    """SHA-256 of the secret, hex."""
    created_at: datetime
    expires_at: datetime | None = None
    revoked: bool = False
    requests_per_minute: int | None = None
    """None leaves it to `api.auth.requests_per_minute`."""
    max_concurrent_requests: int | None = None
    """None leaves it to `api.auth.max_concurrent_requests`."""

    def as_revoked(self) -> KeyRecord:
        """Return the record taken back."""
        return replace(self, revoked=True)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """A key as a caller sent it. Its text is the secret's and appears nowhere else."""

    id: KeyId
    hash: str


class KeyStore(Protocol):
    """Where records are."""

    async def find(self, key: KeyId) -> KeyRecord | None:
        """Return a record, or None. Raises `StateStoreError` when the store cannot be read."""

    async def read_all(self) -> tuple[KeyRecord, ...]:
        """Return all records, oldest first. Raises `StateStoreError`."""

    async def put(self, record: KeyRecord) -> None:
        """Write or replace a record. Raises `StateStoreError`."""

    async def close(self) -> None:
        """Close what is open. Idempotent."""


def make_key(
    name: str,
    *,
    now: datetime,
    lifetime: timedelta | None = None,
    requests_per_minute: int | None = None,
    max_concurrent_requests: int | None = None,
) -> tuple[str, KeyRecord]:
    """Return a new key, which is shown once, and its record.

    Raises:
        ConfigError: The name is not plain, or a number is out of range.
    """
    if len(name) > MAX_NAME_CHARACTERS or _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"key name {name[:80]!r} must have 1 to {MAX_NAME_CHARACTERS} letters, digits, spaces "
            "or any of ._@/- and begin with a letter or digit"
        )
    if lifetime is not None and lifetime <= timedelta(0):
        raise ConfigError(f"a key cannot expire in {lifetime}; give a time above 0")
    for what, value in (
        ("requests per minute", requests_per_minute),
        ("concurrent requests", max_concurrent_requests),
    ):
        if value is not None and not 1 <= value <= _MAX_LIMIT:
            raise ConfigError(f"{what} of a key are {value}, allowed is 1 to {_MAX_LIMIT}")
    key_id, secret = KeyId(secrets.token_hex(8)), secrets.token_urlsafe(32)
    record = KeyRecord(
        id=key_id,
        name=name,
        hash=_hash(secret),
        created_at=now,
        expires_at=None if lifetime is None else now + lifetime,
        requests_per_minute=requests_per_minute,
        max_concurrent_requests=max_concurrent_requests,
    )
    return f"lm_{key_id}_{secret}", record


_MAX_LIMIT: Final = 1_000_000


def parse_key(text: str) -> PresentedKey | None:
    """Return what to look up and compare, or None when the text is no key."""
    found = _KEY.fullmatch(text)
    if found is None:
        return None
    return PresentedKey(id=KeyId(found[1]), hash=_hash(found[2]))


def judge_key(presented: PresentedKey, record: KeyRecord | None, now: datetime) -> Refusal | None:
    """Return why a key is refused, or None when it is good.

    The secret is compared first and in constant time: only who has it learns of expiry or
    revocation.
    """
    stored = _NOBODY if record is None else record.hash
    is_same = hmac.compare_digest(presented.hash, stored)
    if record is None:
        return Refusal.UNKNOWN_KEY
    if not is_same:
        return Refusal.WRONG_KEY
    if record.revoked:
        return Refusal.REVOKED_KEY
    if record.expires_at is not None and now >= record.expires_at:
        return Refusal.EXPIRED_KEY
    return None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("ascii")).hexdigest()


_NOBODY: Final = "0" * 64
