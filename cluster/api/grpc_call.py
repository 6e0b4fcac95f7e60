"""What a gRPC call tells of itself, for all services of the server."""

from __future__ import annotations

import ssl
from typing import Any, TypeAlias

import grpc.aio

from cluster.api.access.client_certificate import subject_of
from cluster.api.access.credentials import Credentials, find_key
from cluster.api.inference import CallContext

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic for type checkers only


def credentials_of(context: _Context, operation: str) -> Credentials:
    """Return what a caller shows: a key in the metadata, a certificate in the handshake."""
    metadata = context.invocation_metadata()
    pairs = () if metadata is None else metadata
    certificates = list(context.auth_context().get("x509_pem_cert") or ())
    subject = None
    if certificates:
        der = ssl.PEM_cert_to_DER_cert(bytes(certificates[0]).decode("ascii"))
        subject = subject_of(der)
    return Credentials(
        door="grpc",
        peer=str(context.peer()),
        operation=operation,
        key=find_key((key, value) for key, value in pairs if isinstance(value, str)),
        certificate=subject,
    )


def call_of(context: _Context) -> CallContext:
    """Return the deadline and the metadata of a call; binary values are left out."""
    metadata = context.invocation_metadata()
    pairs = () if metadata is None else metadata
    return CallContext(
        timeout_s=context.time_remaining(),
        carrier={key: value for key, value in pairs if isinstance(value, str)},
    )
