"""TLS files: read and checked once at the start, and made into what both servers need.

TLS 1.2 is the oldest version spoken; gRPC allows none older either. A new certificate is taken at
the next start.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from cluster.api.access.client_certificate import WitnessedSslObject
from cluster.api.gateway_settings import TlsSettings
from configs.errors import ConfigError

_DATE: Final = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Checked contents of the files, PEM."""

    settings: TlsSettings
    certificate: bytes
    private_key: bytes = field(repr=False)
    client_ca: bytes | None

    @classmethod
    def read(cls, settings: TlsSettings, now: datetime) -> TlsFiles:
        """Read and check.

        Raises:
            ConfigError: A file is missing or damaged, the key is another certificate's, or a
                certificate is not valid now. Names the file, its value and the next step.
        """
        certificate = _read(settings.certificate, "certificate")
        private_key = _read(settings.private_key, "private_key")
        leaf = _parse(certificate, settings.certificate, "certificate")[0]
        _check_time(leaf, settings.certificate, "certificate", now)
        _check_pair(leaf, private_key, settings)
        client_ca = None
        if settings.client_ca is not None:
            client_ca = _read(settings.client_ca, "client_ca")
            for authority in _parse(client_ca, settings.client_ca, "client_ca"):
                _check_time(authority, settings.client_ca, "client_ca", now)
        return cls(settings, certificate, private_key, client_ca)

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server that speaks HTTP/1.1.

        Raises:
            ConfigError: The files have changed since, or OpenSSL finds the key too weak.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.sslobject_class = WitnessedSslObject
        try:
            context.load_cert_chain(self.settings.certificate, self.settings.private_key)
            if self.client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(cadata=self.client_ca.decode("ascii", "replace"))
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"api.tls: {self.settings.certificate} and {self.settings.private_key} cannot be "
                f"used: {exc}"
            ) from exc
        WitnessedSslObject.watch(context)
        return context


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"api.tls.{setting}: {path} cannot be read: {exc.strerror}; give a PEM file that this "
            "user may read"
        ) from exc


def _parse(data: bytes, path: Path, setting: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as exc:
        raise ConfigError(
            f"api.tls.{setting}: {path} holds no PEM certificate ({exc}); it begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from exc


def _check_time(certificate: x509.Certificate, path: Path, setting: str, now: datetime) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    subject = certificate.subject.rfc4514_string()
    if now >= end:
        raise ConfigError(
            f"api.tls.{setting}: the certificate of {subject} in {path} expired on "
            f"{end:{_DATE}}; it is {now:{_DATE}}; renew it and start again"
        )
    if now < start:
        raise ConfigError(
            f"api.tls.{setting}: the certificate of {subject} in {path} is valid from "
            f"{start:{_DATE}}; it is {now:{_DATE}}; wait, or check this machine's clock"
        )


def _check_pair(leaf: x509.Certificate, private_key: bytes, settings: TlsSettings) -> None:
    path = settings.private_key
    try:
        key = load_pem_private_key(private_key, password=None)
    except TypeError as exc:
        raise ConfigError(
            f"api.tls.private_key: {path} needs a passphrase; write it without one, readable by "
            "this user alone (openssl pkey -in OLD -out NEW)"
        ) from exc
    except (ValueError, UnsupportedAlgorithm) as exc:
        # The cause may quote the file.
        raise ConfigError(
            f"api.tls.private_key: {path} holds no PEM private key ({type(exc).__name__})"
        ) from None
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ConfigError(
            f"api.tls.private_key: {path} is not the key of the first certificate in "
            f"{settings.certificate} ({leaf.subject.rfc4514_string()}); give the pair that was "
            "made together"
        )
