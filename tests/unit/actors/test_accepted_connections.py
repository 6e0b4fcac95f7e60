"""Servers that close while somebody connects leave nothing open."""

from __future__ import annotations

import gc
import socket
import warnings

from actors.snapshots.memory import MemoryVault
from actors.snapshots.server import VaultServer


def test_connections_on_their_way_are_closed_with_the_server() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            server = VaultServer(MemoryVault(1 << 20))
            _, host, port = server.start().split(":")
            peers = [socket.create_connection((host, int(port)), 10) for _ in range(3)]
            server.close()
            for peer in peers:
                with peer:
                    assert _is_ended(peer)
        gc.collect()
    assert [one for one in caught if issubclass(one.category, ResourceWarning)] == []


def _is_ended(peer: socket.socket) -> bool:
    try:
        return peer.recv(1) == b""
    except ConnectionResetError:
        return True
