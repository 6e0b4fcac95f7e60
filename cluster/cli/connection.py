"""Connects commands to a server, with what the environment says of keys and TLS."""

from __future__ import annotations

from cluster.api.client import ClientAccess, LatentmeshClient
from configs.environment import client_variables
from configs.errors import ConfigError


def connect(address: str) -> LatentmeshClient:
    """Return a client of the server at `address`.

    A key and files are taken from the environment: on the command line every user of the machine
    could read them.

    Raises:
        ConfigError: A file cannot be read.
    """
    found = client_variables()
    try:
        access = ClientAccess(
            api_key=found.api_key,
            ca=None if found.ca is None else found.ca.read_bytes(),
            certificate=None if found.certificate is None else found.certificate.read_bytes(),
            private_key=None if found.private_key is None else found.private_key.read_bytes(),
        )
    except OSError as exc:
        raise ConfigError(
            f"{exc.filename} cannot be read: {exc.strerror}; LATENTMESH_CA, LATENTMESH_CERTIFICATE "
            "and LATENTMESH_PRIVATE_KEY name PEM files"
        ) from exc
    return LatentmeshClient(address, access)
