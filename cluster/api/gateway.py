"""The gateway: one gRPC and one HTTP server in front of attention workers. Plain asyncio."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.api.gateway_settings import AttentionEndpoint, BoundAddresses, GatewaySettings
from cluster.api.topology import TopologySource

__all__ = ["AttentionEndpoint", "BoundAddresses", "Gateway", "GatewaySettings"]


class Gateway:
    """Skeleton; being written."""

    bound: BoundAddresses

    @classmethod
    async def start(
        cls,
        settings: GatewaySettings,
        endpoints: Sequence[AttentionEndpoint],
        topology: TopologySource,
    ) -> Gateway:
        """Connect, bind, serve."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Close everything. Idempotent."""
        raise NotImplementedError
