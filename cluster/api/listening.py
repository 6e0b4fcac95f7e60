"""Binding TCP ports with errors that say what is wrong, and writing addresses."""

from __future__ import annotations

import errno
import socket

from configs.errors import ConfigError, PortInUseError


def bind_tcp(host: str, port: int, *, setting: str) -> socket.socket:
    """Return a socket that is bound and not yet listening; port 0 takes any free one.

    Args:
        host: Name or address of this machine.
        port: Port.
        setting: Name of the setting that holds the port, for the error.

    Raises:
        PortInUseError: Somebody else listens there.
        ConfigError: The address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(f"api.host: {host!r} is no address of this machine: {exc}") from exc
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        if port != 0:
            bound.listen()  # SO_REUSEADDR lets bind pass beside a listener; listen does not
    except OSError as exc:
        bound.close()
        if exc.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{setting}: port {port} on {host} is in use; choose another one, or 0 for any "
                "free one"
            ) from exc
        raise ConfigError(
            f"api.host and {setting}: {format_address(host, port)} cannot be bound: {exc.strerror}"
        ) from exc
    return bound


def format_address(host: str, port: int) -> str:
    """Return `host:port`; an IPv6 address is bracketed.

    >>> format_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
