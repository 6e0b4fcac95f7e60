"""Asks the attention workers of the cluster how much load their experts had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import numpy as np

from actors.load_recorder import LoadRows
from cluster.api.load import (
    MAX_VALUES,
    HotExpertView,
    LayerLoadView,
    LoadQuestion,
    LoadView,
)
from cluster.control.load_window import LoadWindow
from cluster.ray_gateway import RemoteWorker
from configs.errors import InvalidRequestError, WorkerError
from configs.ids import ClusterId, WorkerId

ROWS_TIMEOUT_S = 3.0
MAX_READS = 64
"""Calls per worker and question, each of up to `actors.load_recorder.MAX_ROWS` rows."""
BUCKET_S = 0.1


class ClusterLoad:
    """The `LoadSource` of a gateway in the cluster."""

    def __init__(self, cluster: ClusterId, workers: Sequence[WorkerId]) -> None:
        """Take the names of the attention workers."""
        self._workers = [RemoteWorker(cluster, name) for name in workers]

    async def load(self, question: LoadQuestion) -> LoadView:
        """See `LoadSource`. Workers that do not answer are named."""
        answers = await asyncio.gather(*(_read_rows(worker) for worker in self._workers))
        heard: dict[WorkerId, list[LoadRows]] = {}
        silent = []
        for worker, rows in zip(self._workers, answers, strict=True):
            if rows is None:
                silent.append(worker.worker)
            else:
                heard[worker.worker] = rows
        return await asyncio.to_thread(describe_load, question, heard, silent)


async def _read_rows(worker: RemoteWorker) -> list[LoadRows] | None:
    """Return what a worker keeps; None if it does not answer."""
    rows: list[LoadRows] = []
    for _ in range(MAX_READS):
        after = rows[-1].next_row if rows else 0
        try:
            answer = await worker.call("load_rows", after, timeout_s=ROWS_TIMEOUT_S)
        except WorkerError:
            return None
        one = cast("LoadRows | None", answer)
        if one is None:
            break
        rows.append(one)
        if one.num_left == 0:
            break
    return rows


def describe_load(
    question: LoadQuestion,
    heard: dict[WorkerId, list[LoadRows]],
    silent: Sequence[WorkerId] = (),
) -> LoadView:
    """Return the load that some workers told of.

    Args:
        question: What to tell.
        heard: Rows of each worker that answered.
        silent: Workers that did not.

    Raises:
        InvalidRequestError: A layer is unknown, or the answer would be too large.
    """
    window = _merge(heard)
    if window is None or window.num_buckets == 0:
        return LoadView(question.quantiles, 0, BUCKET_S, 0.0, tuple(heard), tuple(silent), (), ())
    layers = _layers(question, window)
    at_L = [window.layers.index(layer) for layer in layers]
    picks_QLE = window.quantiles(question.quantiles)[:, at_L]
    mean_LE = window.means()[at_L]
    return LoadView(
        quantiles=question.quantiles,
        num_buckets=window.num_buckets,
        bucket_s=BUCKET_S,
        span_s=window.span_s,
        workers=tuple(heard),
        silent_workers=tuple(silent),
        layers=tuple(
            LayerLoadView(
                layer=layer,
                mean_picks=float(mean_E.sum()),
                peak_to_average=float(mean_E.max() / max(mean_E.mean(), 1e-12)),
                picks_QE=None if question.is_summary else picks_QLE[:, at].astype(np.float32),
            )
            for at, (layer, mean_E) in enumerate(zip(layers, mean_LE, strict=True))
        ),
        hottest=tuple(
            HotExpertView(
                layer=layers[at],
                expert=expert,
                picks=tuple(picks_QLE[:, at, expert].tolist()),
                mean_picks=float(mean_LE[at, expert]),
                share=float(mean_LE[at, expert] / max(mean_LE[at].sum(), 1e-12)),
            )
            for at, expert in _hottest(picks_QLE[-1], question.num_hottest)
        ),
    )


def _merge(heard: dict[WorkerId, list[LoadRows]]) -> LoadWindow | None:
    """Return a window with all rows; None without any."""
    parts = [(worker, one) for worker, rows in heard.items() for one in rows]
    if not parts:
        return None
    first = parts[0][1]
    window = LoadWindow(
        layers=first.layers,
        num_experts=first.counts_RLE.shape[2],
        num_buckets=max(1, sum(len(one.ended_at_R) for _, one in parts)),
        bucket_s=BUCKET_S,
    )
    for worker, one in parts:
        window.add(worker, one.counts_RLE, one.ended_at_R, first_row=one.first, life=one.life)
    return window


def _layers(question: LoadQuestion, window: LoadWindow) -> tuple[int, ...]:
    unknown = sorted(set(question.layers) - set(window.layers))
    if unknown:
        raise InvalidRequestError(
            f"layers {unknown} have no routed experts; those with are {window.layers[0]} to "
            f"{window.layers[-1]}"
        )
    layers = question.layers if question.layers else window.layers
    num_values = len(layers) * len(question.quantiles) * window.means().shape[1]
    if not question.is_summary and num_values > MAX_VALUES:
        raise InvalidRequestError(
            f"{num_values:,} loads are asked for; at most {MAX_VALUES:,} are told at once: name "
            "layers, ask for fewer quantiles, or for a summary"
        )
    return layers


def _hottest(picks_LE: np.ndarray, num: int) -> list[tuple[int, int]]:
    order = np.argsort(-picks_LE, axis=None, kind="stable")[:num]
    layer_N, expert_N = np.unravel_index(order, picks_LE.shape)
    return list(zip(layer_N.tolist(), expert_N.tolist(), strict=True))
