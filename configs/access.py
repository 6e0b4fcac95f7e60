"""Who must show what at the front door. A pure decision over the settings and the bind address.

On loopback nothing is asked by default: whoever reaches it is on this machine. Elsewhere a cluster
does not start unless callers are known and the wire is encrypted, or its owner says that neither is
wanted.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from configs.errors import ConfigError
from configs.schema import ApiConfig


@dataclass(frozen=True, slots=True)
class AccessDecision:
    """What callers must show."""

    needs_key: bool
    """Every request carries an API key."""
    needs_certificate: bool
    """Every connection shows a client certificate."""
    reason: str
    """Why, for the log."""


def decide_access(api: ApiConfig) -> AccessDecision:
    """Decide what callers must show.

    Raises:
        ConfigError: The address is not loopback and callers are unknown or the wire is open; or a
            setting has no effect.
    """
    is_open = not is_loopback(api.host)
    has_tls = api.tls.certificate is not None
    _check_tls(api)
    needs_certificate = api.tls.client_ca is not None
    needs_key, reason = _decide_key(api, is_open=is_open)
    is_safe = has_tls and (needs_key or needs_certificate)
    if is_open and not is_safe and not api.insecure:
        raise ConfigError(_refusal(api, needs_key=needs_key, has_tls=has_tls))
    if api.insecure and (is_safe or not is_open):
        cause = "callers and wire are protected" if is_safe else f"{api.host} is loopback"
        raise ConfigError(f"api.insecure (--insecure) has no effect: {cause}; leave it out")
    _check_key_settings(api, needs_key=needs_key, is_known=needs_key or needs_certificate)
    return AccessDecision(needs_key=needs_key, needs_certificate=needs_certificate, reason=reason)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a bind address. A name other than localhost may not.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _decide_key(api: ApiConfig, *, is_open: bool) -> tuple[bool, str]:
    wanted = api.auth.keys
    if wanted != "auto":
        return wanted == "required", f"api.auth.keys is {wanted}"
    if api.auth.key_file is not None:
        return True, "api.auth.key_file is set"
    if not is_open:
        return False, f"api.host {api.host} is loopback"
    if api.tls.client_ca is not None:
        return False, "api.tls.client_ca asks every client for a certificate"
    if api.insecure:
        return False, "api.insecure is set"
    return True, f"api.host {api.host} is not loopback"


def _check_tls(api: ApiConfig) -> None:
    tls = api.tls
    if (tls.certificate is None) != (tls.private_key is None):
        missing = "private_key" if tls.private_key is None else "certificate"
        raise ConfigError(
            f"api.tls.{missing} is not set, but its other half is; set api.tls.certificate and "
            "api.tls.private_key together"
        )
    if tls.client_ca is not None and tls.certificate is None:
        raise ConfigError(
            "api.tls.client_ca has no effect without api.tls.certificate and api.tls.private_key; "
            "set them, or leave it out"
        )


def _check_key_settings(api: ApiConfig, *, needs_key: bool, is_known: bool) -> None:
    auth = api.auth
    if not needs_key:
        for name in ("key_file", "cache_s"):
            if name in auth.model_fields_set and getattr(auth, name) is not None:
                raise ConfigError(
                    f"api.auth.{name} has no effect: no key is asked for; leave it out, or set "
                    "api.auth.keys to required"
                )
    if is_known:
        return
    for name in ("requests_per_minute", "max_concurrent_requests"):
        if getattr(auth, name) is not None:
            raise ConfigError(
                f"api.auth.{name} has no effect: callers are not known; set api.auth.keys to "
                "required or api.tls.client_ca, or leave it out"
            )


def _refusal(api: ApiConfig, *, needs_key: bool, has_tls: bool) -> str:
    steps = []
    if not has_tls:
        steps.append("set api.tls.certificate and api.tls.private_key")
    if not needs_key and api.tls.client_ca is None:
        steps.append("set api.auth.keys to auto or required, or api.tls.client_ca")
    return (
        f"api.host is {api.host}, which other machines reach, and "
        f"{'callers would be unknown' if has_tls else 'the wire would be open'}: "
        f"{' and '.join(steps)}; or bind 127.0.0.1; or say --insecure (api.insecure) where "
        "something else protects the port"
    )
