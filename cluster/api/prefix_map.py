"""Which attention worker has how much of a prompt in its prefix cache, from what the workers tell.

For choosing a worker only, so it may be behind: a worker looks again itself. What is known of a
worker ends with its connection, so that no answer ever names one that is gone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from actors.prefix_chain import chain_keys
from actors.request_channel import PrefixNews
from configs.ids import WorkerId

MAX_KEYS: Final = 1 << 18
"""Prefixes that are remembered of one worker; further ones are not."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Cache:
    """What one worker told."""

    block_tokens: int
    epoch: int | None = None
    """Of its last message; None before the first."""
    keys: set[bytes] = field(default_factory=set)


class PrefixMap:
    """The prefix caches of all connected workers, as far as they are known. Pure."""

    def __init__(self) -> None:
        self._caches: dict[WorkerId, _Cache] = {}

    def add_worker(self, worker: WorkerId, block_tokens: int) -> None:
        """Begin with a worker of which nothing is known, for example one that connected again.

        Args:
            worker: Its name.
            block_tokens: Tokens per link of its chains; below 1 it takes no part.
        """
        self._caches.pop(worker, None)
        if block_tokens >= 1:
            self._caches[worker] = _Cache(block_tokens)

    def drop_worker(self, worker: WorkerId) -> None:
        """Forget a worker; what it tells from now on is ignored."""
        self._caches.pop(worker, None)

    def num_keys(self, worker: WorkerId) -> int:
        """Prefixes that are known of a worker."""
        cache = self._caches.get(worker)
        return 0 if cache is None else len(cache.keys)

    def take(self, worker: WorkerId, news: PrefixNews) -> None:
        """Note what a worker's cache gained and lost.

        A message that is not the next one means that some were missed: what was known is dropped,
        because prefixes that are gone may be among it.
        """
        cache = self._caches.get(worker)
        if cache is None:
            return
        if cache.epoch is not None and news.epoch != cache.epoch + 1:
            _log.warning(
                "attention worker %s: news of prefixes jump from epoch %d to %d; %d known ones "
                "are dropped",
                worker,
                cache.epoch,
                news.epoch,
                len(cache.keys),
            )
            cache.keys.clear()
        cache.epoch = news.epoch
        cache.keys.difference_update(news.removed)
        room = MAX_KEYS - len(cache.keys)
        cache.keys.update(news.added[:room])
        if len(news.added) > room:
            _log.warning(
                "attention worker %s: more than %d prefixes; %d are not remembered",
                worker,
                MAX_KEYS,
                len(news.added) - room,
            )

    def longest(self, token_ids: Sequence[int]) -> dict[WorkerId, int]:
        """Return how many of the first tokens each worker has; workers without any are left out.

        Nothing is hashed while no worker has any. Keys do not say how long their prefixes are, so
        the whole prompt is: some 5 us per block.
        """
        by_block: dict[int, dict[WorkerId, set[bytes]]] = {}
        for worker, cache in self._caches.items():
            if cache.keys:
                by_block.setdefault(cache.block_tokens, {})[worker] = cache.keys
        found: dict[WorkerId, int] = {}
        for block_tokens, caches in by_block.items():
            for num_blocks, key in enumerate(chain_keys(token_ids, block_tokens), 1):
                for worker, keys in caches.items():
                    if key in keys:
                        found[worker] = num_blocks * block_tokens
        return found
