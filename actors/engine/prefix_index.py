"""Which prefixes of tokens are in memory, so that a request that begins with one goes on there.

A prefix is reusable where a *prefix snapshot* lies: an immutable copy of the KDA + conv state at a
position, and the MLA blocks before it, which it holds in the block pool. Recurrent state cannot be
cut, so a hit is exactly at a snapshot, never before or behind it.

The index is a tree over whole blocks, its nodes named by chains of hashes
(`actors/prefix_chain.py`); a snapshot hangs at the node of its last whole block, by the tokens of
the block after it that it covers in part. That block is held too, and copied by whoever goes on
from there.

The form in which a token was computed is part of its name: under invariant numerics an answer,
which decode computed, is no prefix of a prompt, which prefill computes, because the bits differ.

Eviction: GreedyDual-Size (Cao and Irani, USITS 1997). A snapshot is worth the tokens that it saves
beyond the next shorter one on its path, per byte that it alone keeps, plus the clock at its last
use; the least is dropped first and becomes the clock. So a state that is dear to keep and saves
little goes before one of the same age that saves much, and age beats both in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from actors.engine.block_pool import BlockPool
from actors.prefix_chain import chain_keys
from model.cache import SlotCopy

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class PrefixSnapshot:
    """One reusable position. Only `priority` changes, by the index."""

    position: int
    """Tokens before it, at least 1."""
    blocks: tuple[int, ...]
    """Blocks that hold them; the last one may be covered in part."""
    slot: SlotCopy
    node_key: bytes
    tail: bytes
    worth: float
    """Tokens saved per byte."""
    priority: float


@dataclass(slots=True)
class _Node:
    """A chain of whole blocks of which snapshots or longer chains are known."""

    parent: bytes | None
    num_children: int = 0
    tails: dict[int, dict[bytes, PrefixSnapshot]] = field(default_factory=dict)
    """By the number of tokens after the last whole block, then by these."""

    def snapshots(self) -> Iterator[PrefixSnapshot]:
        return chain.from_iterable(by_tail.values() for by_tail in self.tails.values())


@dataclass(frozen=True, slots=True)
class IndexNews:
    """Keys of chains that have gained their first snapshot, or lost their last one."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]


class PrefixIndex:
    """Prefix snapshots of one worker. Owned by the engine thread."""

    def __init__(
        self, blocks: BlockPool, *, block_tokens: int, block_bytes: int, max_bytes: int
    ) -> None:
        """Begin empty.

        Args:
            blocks: Snapshots hold their blocks there.
            block_tokens: Tokens per block.
            block_bytes: Of one block over all layers.
            max_bytes: Budget of the state copies; 0 keeps none. (Blocks are the pool's: they are
                given up when requests need them.)
        """
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._root = _Node(parent=None)
        self._nodes: dict[bytes, _Node] = {b"": self._root}
        self._snapshots: dict[int, PrefixSnapshot] = {}
        """Least recently used first, which breaks ties."""
        self._clock = 0.0
        self._added: set[bytes] = set()
        self._removed: set[bytes] = set()
        self.num_bytes = 0
        """Bytes of all state copies."""
        self.reserved_bytes = 0
        """Part of the budget that is taken by copies of other kinds."""
        self.num_evicted = 0
        self.version = 0
        """Grows with every change: a hit found at another version must be looked up again."""

    def __len__(self) -> int:
        """Snapshots."""
        return len(self._snapshots)

    @property
    def is_enabled(self) -> bool:
        """Whether it may keep anything."""
        return self._max_bytes > 0

    def match(self, tokens: Tokens, limit: int) -> PrefixSnapshot | None:
        """Return the longest snapshot of a prefix of at most `limit` tokens; changes nothing."""
        if not self._snapshots:
            return None
        best = self._match_tail(self._root, tokens, 0, limit)
        depth = 0
        for key in chain_keys(tokens[:limit], self._block_tokens):
            node = self._nodes.get(key)
            if node is None:
                break
            depth += self._block_tokens
            found = self._match_tail(node, tokens, depth, limit)
            best = best if found is None else found
        return best

    def touch(self, snapshot: PrefixSnapshot) -> None:
        """Note that a snapshot was used; nothing happens if it has been given up."""
        if self._snapshots.pop(id(snapshot), None) is not None:
            snapshot.priority = self._clock + snapshot.worth
            self._snapshots[id(snapshot)] = snapshot

    def insert(self, tokens: Tokens, blocks: tuple[int, ...], slot: SlotCopy) -> bool:
        """Keep a snapshot after `tokens`; False if there is one already or it exceeds the budget.

        Args:
            tokens: All tokens before it, at least 1.
            blocks: That hold exactly these; in use by the caller.
            slot: State after them; kept.
        """
        if not len(tokens) or slot.num_bytes > self._max_bytes - self.reserved_bytes:
            return False
        shorter = self.match(tokens, len(tokens))
        if shorter is not None and shorter.position == len(tokens):
            self.touch(shorter)
            return False
        self.evict_for_bytes(slot.num_bytes)
        keys = [b"", *chain_keys(tokens, self._block_tokens)]
        num_whole = (len(keys) - 1) * self._block_tokens
        gain = len(tokens) - (0 if shorter is None else shorter.position)
        num_bytes = slot.num_bytes + self._blocks.count_unheld(blocks) * self._block_bytes
        snapshot = PrefixSnapshot(
            position=len(tokens),
            blocks=blocks,
            slot=slot,
            node_key=keys[-1],
            tail=tokens[num_whole:].tobytes(),
            worth=gain / num_bytes,
            priority=self._clock + gain / num_bytes,
        )
        self._blocks.hold(blocks)
        self._add(snapshot, keys, len(tokens) - num_whole)
        return True

    def evict_for_blocks(self, num_blocks: int) -> None:
        """Drop the least valuable snapshots until `num_blocks` blocks are free or none is left."""
        while self._blocks.num_free < num_blocks and self._snapshots:
            self._evict_least()

    def evict_for_bytes(self, num_bytes: int) -> None:
        """Drop the least valuable snapshots until `num_bytes` of the budget are free."""
        budget = self._max_bytes - self.reserved_bytes - num_bytes
        while self.num_bytes > budget and self._snapshots:
            self._evict_least()

    @property
    def room_bytes(self) -> int:
        """Bytes that copies of other kinds could get, if every snapshot had to give way."""
        return self._max_bytes - self.reserved_bytes

    def flush(self) -> int:
        """Drop every snapshot; returns how many. Blocks in use stay with their requests."""
        num_flushed = len(self._snapshots)
        for snapshot in list(self._snapshots.values()):
            self._remove(snapshot)
        return num_flushed

    def keys(self) -> tuple[bytes, ...]:
        """Chains of whole blocks that end at a snapshot or less than a block before one."""
        return tuple(key for key, node in self._nodes.items() if key and node.tails)

    def take_news(self) -> IndexNews | None:
        """Return what has changed in `keys` since the last call; None if nothing has."""
        if not self._added and not self._removed:
            return None
        news = IndexNews(tuple(self._added), tuple(self._removed))
        self._added, self._removed = set(), set()
        return news

    def _match_tail(
        self, node: _Node, tokens: Tokens, depth: int, limit: int
    ) -> PrefixSnapshot | None:
        best: PrefixSnapshot | None = None
        for num_tokens, by_tail in node.tails.items():
            end = depth + num_tokens
            if end <= limit and (best is None or end > best.position):
                found = by_tail.get(tokens[depth:end].tobytes())
                best = best if found is None else found
        return best

    def _add(self, snapshot: PrefixSnapshot, keys: list[bytes], num_tail: int) -> None:
        for parent, key in pairwise(keys):
            if key not in self._nodes:
                self._nodes[key] = _Node(parent=parent)
                self._nodes[parent].num_children += 1
        node = self._nodes[snapshot.node_key]
        if snapshot.node_key and not node.tails:
            self._note(snapshot.node_key, self._added, self._removed)
        node.tails.setdefault(num_tail, {})[snapshot.tail] = snapshot
        self._snapshots[id(snapshot)] = snapshot
        self.num_bytes += snapshot.slot.num_bytes
        self.version += 1

    def _evict_least(self) -> None:
        least = min(self._snapshots.values(), key=lambda one: (one.priority, -one.position))
        self._clock = max(self._clock, least.priority)
        self.num_evicted += 1
        self._remove(least)

    def _remove(self, snapshot: PrefixSnapshot) -> None:
        del self._snapshots[id(snapshot)]
        self._blocks.release(snapshot.blocks)
        self.num_bytes -= snapshot.slot.num_bytes
        self.version += 1
        node = self._nodes[snapshot.node_key]
        num_tail = snapshot.position % self._block_tokens
        by_tail = node.tails[num_tail]
        del by_tail[snapshot.tail]
        if not by_tail:
            del node.tails[num_tail]
        if snapshot.node_key and not node.tails:
            self._note(snapshot.node_key, self._removed, self._added)
        self._prune(snapshot.node_key)

    def _prune(self, key: bytes) -> None:
        """Forget nodes that lead nowhere any more."""
        node = self._nodes[key]
        while node.parent is not None and not node.tails and not node.num_children:
            del self._nodes[key]
            key = node.parent
            node = self._nodes[key]
            node.num_children -= 1

    @staticmethod
    def _note(key: bytes, happened: set[bytes], undone: set[bytes]) -> None:
        if key in undone:
            undone.discard(key)
        else:
            happened.add(key)
