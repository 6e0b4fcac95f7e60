"""Sees the client certificate of a handshake, also of one that OpenSSL refuses.

A refused handshake ends before OpenSSL keeps the certificate, so nothing public of `ssl` can tell
whose it was. The message callback that CPython has for its own tests sees the bytes as they come:
https://github.com/python/cpython/blob/3.11/Lib/ssl.py (SSLContext._msg_callback). Where a Python
lacks it, the log names the peer alone. Goes when `ssl` offers a verification callback.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any, Final

from cryptography import x509

_HANDSHAKE_RECORD: Final = 22
_CERTIFICATE_MESSAGE: Final = 11
_MAX_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class HandshakeFailure:
    """Why a handshake failed, and whose certificate was shown, if any."""

    reason: str
    certificate: str | None


class WitnessedSslObject(ssl.SSLObject):
    """One TLS connection that remembers the certificate it was shown and why it failed."""

    _shown: bytes | None = None

    @classmethod
    def watch(cls, context: ssl.SSLContext) -> None:
        """Let connections of a context see certificates."""
        if hasattr(type(context), "_msg_callback"):
            context._msg_callback = _see_message  # type: ignore[attr-defined]  # noqa: SLF001 - see above

    def do_handshake(self) -> None:
        """Go on with the handshake; a failure carries what is known of the client."""
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as exc:
            certificate = None if self._shown is None else describe_certificate(self._shown)
            exc.witnessed = HandshakeFailure(_reason(exc), certificate)  # type: ignore[attr-defined]  # travels with it
            raise

    def see_certificate(self, message: bytes, *, is_tls_1_3: bool) -> None:
        """Keep the first certificate of a Certificate message."""
        if self._shown is None and len(message) <= _MAX_BYTES:
            self._shown = first_certificate(message, is_tls_1_3=is_tls_1_3)


def failure_of(error: BaseException) -> HandshakeFailure:
    """Return what is known of a failed handshake."""
    found = getattr(error, "witnessed", None)
    if isinstance(found, HandshakeFailure):
        return found
    if isinstance(error, TimeoutError):
        return HandshakeFailure("it took too long", None)
    text = str(error)
    return HandshakeFailure(text if text else type(error).__name__, None)


def first_certificate(message: bytes, *, is_tls_1_3: bool) -> bytes | None:
    """Return the DER bytes of the first certificate of a Certificate message, or None.

    RFC 5246 7.4.2: type, 3 bytes of length, 3 bytes of list length, 3 bytes of length. RFC 8446
    4.4.2 has a context with one byte of length before the list.
    """
    start = 4
    if is_tls_1_3:
        if len(message) <= start:
            return None
        start += 1 + message[start]
    start += 3
    length = int.from_bytes(message[start : start + 3], "big")
    der = message[start + 3 : start + 3 + length]
    return der if length and len(der) == length else None


def describe_certificate(der: bytes) -> str | None:
    """Return subject, issuer and end of a certificate, or None when it is none."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        return (
            f"{certificate.subject.rfc4514_string()} issued by "
            f"{certificate.issuer.rfc4514_string()}, valid until "
            f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M UTC}"
        )
    except ValueError:
        return None


def subject_of(der: bytes) -> str:
    """Return the subject of a certificate that was verified."""
    return x509.load_der_x509_certificate(der).subject.rfc4514_string()


def _see_message(
    connection: object,
    direction: str,
    version: object,
    content_type: int,
    message_type: int,
    data: bytes,
) -> None:
    is_certificate = content_type == _HANDSHAKE_RECORD and message_type == _CERTIFICATE_MESSAGE
    if direction == "read" and is_certificate and isinstance(connection, WitnessedSslObject):
        connection.see_certificate(data, is_tls_1_3=version == ssl.TLSVersion.TLSv1_3)


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    reason: Any = error.reason
    return str(error) if reason is None else str(reason).lower().replace("_", " ")
