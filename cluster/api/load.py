"""What GetLoadQuantiles tells, as frozen values, and their way into and out of the proto.

Whoever can ask the attention workers fulfils `LoadSource`; the gateway only asks it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.api.generated.latentmesh.v1 import fabric_pb2
from configs.errors import InvalidRequestError, TransportTimeoutError
from configs.ids import WorkerId

LOAD_TIMEOUT_S: Final = 10.0
DEFAULT_QUANTILES: Final = (0.5, 0.99)
MAX_QUANTILES: Final = 16
MAX_HOTTEST: Final = 1024
MAX_VALUES: Final = 500_000
"""Loads in one answer; a gRPC client takes 4 MiB unless told otherwise."""


@dataclass(frozen=True, slots=True)
class LoadQuestion:
    """What is asked. Fields as in `latentmesh.v1.GetLoadQuantilesRequest`."""

    quantiles: tuple[float, ...] = DEFAULT_QUANTILES
    layers: tuple[int, ...] = ()
    num_hottest: int = 0
    is_summary: bool = False


@dataclass(frozen=True, slots=True)
class LayerLoadView:
    """One layer. Fields as in `latentmesh.v1.LayerLoad`."""

    layer: int
    mean_picks: float
    peak_to_average: float
    picks_QE: NDArray[np.float32] | None
    """Picks per bucket by quantile and expert; None in a summary."""


@dataclass(frozen=True, slots=True)
class HotExpertView:
    """One expert. Fields as in `latentmesh.v1.HotExpert`."""

    layer: int
    expert: int
    picks: tuple[float, ...]
    mean_picks: float
    share: float


@dataclass(frozen=True, slots=True)
class LoadView:
    """The load of the last moments. Fields as in `latentmesh.v1.GetLoadQuantilesResponse`."""

    quantiles: tuple[float, ...]
    num_buckets: int
    bucket_s: float
    span_s: float
    workers: tuple[WorkerId, ...]
    silent_workers: tuple[WorkerId, ...]
    layers: tuple[LayerLoadView, ...]
    hottest: tuple[HotExpertView, ...]


class LoadSource(Protocol):
    """Where a gateway gets the load of experts."""

    async def load(self, question: LoadQuestion) -> LoadView:
        """Return the load of the last moments.

        Raises:
            InvalidRequestError: A layer is unknown, or the answer would be too large.
            ServingError: It cannot be had now.
        """


class NoLoad:
    """The source of a gateway beside which nothing is recorded."""

    async def load(self, question: LoadQuestion) -> LoadView:
        """Return a window without load."""
        return LoadView(question.quantiles, 0, 0.0, 0.0, (), (), (), ())


async def take_load(source: LoadSource, question: LoadQuestion) -> LoadView:
    """Return the load of the last moments.

    Raises:
        TransportTimeoutError: It did not come within `LOAD_TIMEOUT_S`.
        ServingError: See `LoadSource.load`.
    """
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            return await source.load(question)
    except TimeoutError as exc:
        raise TransportTimeoutError(
            f"the attention workers did not tell their load within {LOAD_TIMEOUT_S:g} s; retry"
        ) from exc


def read_question(request: fabric_pb2.GetLoadQuantilesRequest) -> LoadQuestion:
    """Return what is asked.

    Raises:
        InvalidRequestError: A quantile is outside 0..1, or more is asked for than is answered.
    """
    quantiles = tuple(request.quantiles) if request.quantiles else DEFAULT_QUANTILES
    for quantile in quantiles:
        if math.isnan(quantile) or not 0 <= quantile <= 1:
            raise InvalidRequestError(f"a quantile of {quantile} is outside 0..1")
    if len(quantiles) > MAX_QUANTILES:
        raise InvalidRequestError(
            f"{len(quantiles)} quantiles are asked for; at most {MAX_QUANTILES} are told at once"
        )
    if request.num_hottest > MAX_HOTTEST:
        raise InvalidRequestError(
            f"the {request.num_hottest} hottest experts are asked for; at most {MAX_HOTTEST} "
            "are told at once"
        )
    return LoadQuestion(quantiles, tuple(request.layers), request.num_hottest, request.summary_only)


def write_question(question: LoadQuestion) -> fabric_pb2.GetLoadQuantilesRequest:
    """Return the message of a question."""
    return fabric_pb2.GetLoadQuantilesRequest(
        quantiles=question.quantiles,
        layers=question.layers,
        num_hottest=question.num_hottest,
        summary_only=question.is_summary,
    )


def write_load(view: LoadView) -> fabric_pb2.GetLoadQuantilesResponse:
    """Return the message of a view; nothing is left out."""
    return fabric_pb2.GetLoadQuantilesResponse(
        quantiles=view.quantiles,
        num_buckets=view.num_buckets,
        bucket_s=view.bucket_s,
        span_s=view.span_s,
        workers=view.workers,
        silent_workers=view.silent_workers,
        layers=[
            fabric_pb2.LayerLoad(
                layer=one.layer,
                mean_picks=one.mean_picks,
                peak_to_average=one.peak_to_average,
                quantiles=[]
                if one.picks_QE is None
                else [fabric_pb2.ExpertLoads(picks=picks_E.tolist()) for picks_E in one.picks_QE],
            )
            for one in view.layers
        ],
        hottest=[
            fabric_pb2.HotExpert(
                layer=one.layer,
                expert=one.expert,
                picks=one.picks,
                mean_picks=one.mean_picks,
                share=one.share,
            )
            for one in view.hottest
        ],
    )


def read_load(message: fabric_pb2.GetLoadQuantilesResponse) -> LoadView:
    """Return the view of a message."""
    return LoadView(
        quantiles=tuple(message.quantiles),
        num_buckets=message.num_buckets,
        bucket_s=message.bucket_s,
        span_s=message.span_s,
        workers=tuple(WorkerId(name) for name in message.workers),
        silent_workers=tuple(WorkerId(name) for name in message.silent_workers),
        layers=tuple(
            LayerLoadView(
                layer=one.layer,
                mean_picks=one.mean_picks,
                peak_to_average=one.peak_to_average,
                picks_QE=np.array([list(loads.picks) for loads in one.quantiles], np.float32)
                if one.quantiles
                else None,
            )
            for one in message.layers
        ),
        hottest=tuple(
            HotExpertView(one.layer, one.expert, tuple(one.picks), one.mean_picks, one.share)
            for one in message.hottest
        ),
    )
