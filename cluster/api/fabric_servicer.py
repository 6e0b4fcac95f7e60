"""latentmesh.v1.ExpertFabricService over gRPC."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import grpc.aio

from cluster.api.generated.latentmesh.v1 import fabric_pb2, fabric_pb2_grpc
from cluster.api.load import LoadSource, read_question, take_load, write_load

DESCRIPTOR: Final = fabric_pb2.DESCRIPTOR.services_by_name["ExpertFabricService"]
SERVICE: Final = DESCRIPTOR.full_name

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # generic for type checkers only


class FabricServicer(fabric_pb2_grpc.ExpertFabricServiceServicer):
    """Answers from a load source. Exceptions are the barrier's business."""

    def __init__(self, load: LoadSource) -> None:
        """Take the source."""
        self._load = load

    async def GetLoadQuantiles(  # noqa: N802 - named by the proto
        self, request: fabric_pb2.GetLoadQuantilesRequest, context: _Context
    ) -> fabric_pb2.GetLoadQuantilesResponse:
        """See the proto."""
        del context
        return write_load(await take_load(self._load, read_question(request)))
