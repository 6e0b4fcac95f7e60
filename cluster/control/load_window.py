"""The load of all experts over the last moments: a ring of buckets of time.

Steps of different attention workers that run at the same time load the expert workers together, so
their counts are summed by time. Sums are of whole numbers: merging is exact and the order in which
rows arrive does not matter.

Shapes: T buckets, L MoE layers, E logical experts, R rows, Q quantiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from configs.errors import InvalidRequestError, PlacementError
from configs.ids import WorkerId


class LoadWindow:
    """Buckets of the last moments. Owned by one thread."""

    def __init__(
        self,
        *,
        layers: Sequence[int],
        num_experts: int,
        num_buckets: int = 128,
        bucket_s: float = 0.1,
    ) -> None:
        """Allocate the ring.

        Args:
            layers: MoE layers.
            num_experts: Of each.
            num_buckets: Most buckets that are kept; those without a step take no place.
            bucket_s: Seconds of a bucket; about a step, so that its load is that of a step.
        """
        self.layers = tuple(layers)
        self.num_late = 0
        """Rows that came after their bucket had left the window, and rows that came twice."""
        self._bucket_s = bucket_s
        self._counts_TLE = np.zeros((num_buckets, len(self.layers), num_experts), np.uint32)
        self._slots: dict[int, int] = {}
        """Place in the ring by bucket number."""
        self._next_rows: dict[WorkerId, int] = {}
        self._lives: dict[WorkerId, float] = {}

    @property
    def num_buckets(self) -> int:
        """Buckets with steps."""
        return len(self._slots)

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Attention workers that were heard."""
        return tuple(sorted(self._next_rows))

    @property
    def memory_bytes(self) -> int:
        """Of the ring."""
        return int(self._counts_TLE.nbytes)

    @property
    def span_s(self) -> float:
        """From the first bucket's start to the last one's end, seconds."""
        if not self._slots:
            return 0.0
        return (max(self._slots) - min(self._slots) + 1) * self._bucket_s

    def next_row(self, worker: WorkerId) -> int:
        """Return the number of the first row of a worker that is not in yet."""
        return self._next_rows.get(worker, 0)

    def add(
        self,
        worker: WorkerId,
        counts_RLE: NDArray[np.unsignedinteger],
        ended_at_R: NDArray[np.float64],
        *,
        first_row: int,
        life: float = 0.0,
    ) -> None:
        """Take rows of a worker, which are numbered from `first_row` on; each counts once.

        Args:
            worker: Who counted.
            counts_RLE: Picks.
            ended_at_R: Seconds since 1970.
            first_row: Number of the first of them.
            life: Tells a worker from one of the same name before it; numbers begin anew.

        Raises:
            PlacementError: The rows are of other layers or experts.
        """
        if counts_RLE.shape[1:] != self._counts_TLE.shape[1:]:
            raise PlacementError(
                f"{worker} counts {counts_RLE.shape[1:]} layers and experts, the window holds "
                f"{self._counts_TLE.shape[1:]}"
            )
        if self._lives.get(worker) != life:
            self._lives[worker] = life
            self._next_rows[worker] = 0
        known = min(max(0, self.next_row(worker) - first_row), len(ended_at_R))
        self.num_late += known
        for counts_LE, ended_at in zip(counts_RLE[known:], ended_at_R[known:], strict=True):
            slot = self._slot_of(int(ended_at // self._bucket_s))
            if slot is None:
                self.num_late += 1
            else:
                self._counts_TLE[slot] += counts_LE
        self._next_rows[worker] = max(self.next_row(worker), first_row + len(ended_at_R))

    def loads(self) -> NDArray[np.uint32]:
        """Return picks per bucket `[T, L, E]`, oldest first: a copy."""
        order = [self._slots[bucket] for bucket in sorted(self._slots)]
        return self._counts_TLE[order]

    def quantiles(self, quantiles: Sequence[float]) -> NDArray[np.float64]:
        """Return quantiles over the buckets, `[Q, L, E]`.

        A quantile q is the least value that at least a part q of the buckets does not exceed
        (nearest rank): a load that did occur.

        Raises:
            InvalidRequestError: A quantile is outside 0..1, or there is no bucket.
        """
        for quantile in quantiles:
            if not 0 <= quantile <= 1:
                raise InvalidRequestError(f"a quantile of {quantile} is outside 0..1")
        if not self._slots:
            raise InvalidRequestError("no load was recorded; quantiles need at least one step")
        num = len(self._slots)
        ranks = [max(0, int(np.ceil(quantile * num - 1e-9)) - 1) for quantile in quantiles]
        parted_TLE = np.partition(self.loads(), sorted(set(ranks)), axis=0)
        found_QLE: NDArray[np.float64] = parted_TLE[ranks].astype(np.float64)
        return found_QLE

    def means(self) -> NDArray[np.float64]:
        """Return the mean picks per bucket `[L, E]`; zeros without a bucket."""
        if not self._slots:
            return np.zeros(self._counts_TLE.shape[1:])
        mean_LE: NDArray[np.float64] = self._counts_TLE.sum(axis=0) / len(self._slots)
        return mean_LE

    def _slot_of(self, bucket: int) -> int | None:
        """Return the place of a bucket, an empty one if it is new; None if it is too old."""
        slot = self._slots.get(bucket)
        if slot is not None:
            return slot
        if len(self._slots) < len(self._counts_TLE):
            slot = len(self._slots)
        elif bucket < min(self._slots):
            return None
        else:
            slot = self._slots.pop(min(self._slots))
            self._counts_TLE[slot] = 0
        self._slots[bucket] = slot
        return slot
