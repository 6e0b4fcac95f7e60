"""Which tokens a prompt and its answer hold, for penalties; kept up to date token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Distinct tokens of one request. Arrays that are handed out are views: read, do not keep."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        """Count no answer yet."""
        self._seen = _Ids(np.unique(np.asarray(prompt_ids, dtype=np.int64)))
        self._answer = _Ids(np.empty(0, dtype=np.int64))
        self._counts = np.zeros(16, dtype=np.float64)

    @property
    def seen_ids(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and answer."""
        return self._seen.ids

    @property
    def answer_ids(self) -> NDArray[np.int64]:
        """Distinct tokens of the answer."""
        return self._answer.ids

    @property
    def answer_counts(self) -> NDArray[np.float64]:
        """How often the answer holds each of `answer_ids`."""
        return self._counts[: self._answer.num_ids]

    def append(self, token_id: int) -> None:
        """Add a token of the answer."""
        self._seen.index_of(token_id)
        index = self._answer.index_of(token_id)
        if index >= self._counts.size:
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._counts[index] += 1


class _Ids:
    """Distinct ids in order of their first appearance, in an array that grows by doubling."""

    def __init__(self, ids: NDArray[np.int64]) -> None:
        self.num_ids = ids.size
        self._index = {int(token_id): index for index, token_id in enumerate(ids)}
        self._array = np.zeros(max(16, 2 * ids.size), dtype=np.int64)
        self._array[: ids.size] = ids

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._array[: self.num_ids]

    def index_of(self, token_id: int) -> int:
        """Index of an id, which is added if it is new."""
        index = self._index.setdefault(token_id, self.num_ids)
        if index == self.num_ids:
            if index == self._array.size:
                self._array = np.concatenate([self._array, np.zeros_like(self._array)])
            self._array[index] = token_id
            self.num_ids += 1
        return index
