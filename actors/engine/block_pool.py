"""Which request or prefix snapshot owns which block of the MLA cache. Ids only.

The tensors are `model.cache`'s. A block may be shared by several requests once nobody writes it any
more, and held by prefix snapshots besides.

Invariant: every block is free, used by as many requests as its count says, or cached: held by
prefix snapshots only. `num_free + num_used + num_cached == num_blocks`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from configs.errors import InvariantError, OverloadedError


class BlockPool:
    """Hands out block ids. Owned by one engine thread.

    Contents are not cleared: a block is written before the decoder reads it, because a request's
    table is read up to its own position only.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_users = [0] * num_blocks
        self._num_holders = [0] * num_blocks
        self._num_cached = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that prefix snapshots hold and no request uses."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that at least one request uses."""
        return self._num_blocks - len(self._free) - self._num_cached

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Hand out `num_blocks` free blocks to a request, all or none.

        Raises:
            OverloadedError: Fewer are free.
        """
        if num_blocks > len(self._free):
            raise OverloadedError(
                f"{num_blocks} cache blocks asked for, {len(self._free)} of {self._num_blocks} "
                "are free; wait until a running request ends"
            )
        blocks = tuple(self._free.pop() for _ in range(num_blocks))
        for block in blocks:
            self._num_users[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of each block.

        Raises:
            InvariantError: One of them is free; none is counted.
        """
        self._check_owned(blocks, "shared")
        for block in blocks:
            if not self._num_users[block]:
                self._num_cached -= 1
            self._num_users[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take one user off each block; one without users and holders is free.

        Raises:
            InvariantError: One of them is not in use; none is taken back.
        """
        for block in blocks:
            if not 0 <= block < self._num_blocks or not self._num_users[block]:
                raise self._not_owned(block, "freed")
        if len(set(blocks)) != len(blocks):
            raise InvariantError(f"blocks freed twice in one call: {list(blocks)}")
        for block in blocks:
            self._num_users[block] -= 1
            if not self._num_users[block]:
                if self._num_holders[block]:
                    self._num_cached += 1
                else:
                    self._free.append(block)

    def hold(self, blocks: Sequence[int]) -> None:
        """Count one more holder of each block: it stays when its users are gone.

        Raises:
            InvariantError: One of them is free; none is counted.
        """
        self._check_owned(blocks, "held")
        for block in blocks:
            self._num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one holder off each block.

        Raises:
            InvariantError: One of them is not held; none is changed.
        """
        for block in blocks:
            if not 0 <= block < self._num_blocks or not self._num_holders[block]:
                raise self._not_owned(block, "released")
        if len(set(blocks)) != len(blocks):
            raise InvariantError(f"blocks released twice in one call: {list(blocks)}")
        for block in blocks:
            self._num_holders[block] -= 1
            if not self._num_holders[block] and not self._num_users[block]:
                self._num_cached -= 1
                self._free.append(block)

    def count_private(self, blocks: Sequence[int]) -> int:
        """Return how many blocks of a request it alone uses: what its end leaves for others.

        Args:
            blocks: All of its blocks, in order. Requests share prefixes: those that have other
                users come first.
        """
        users = self._num_users
        if not blocks or users[blocks[0]] == 1:
            return len(blocks)
        return len(blocks) - bisect.bisect_left(blocks, -1, key=lambda block: -users[block])

    def count_cached(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` no request uses."""
        users = self._num_users
        return sum(not users[block] for block in blocks)

    def count_unheld(self, blocks: Sequence[int]) -> int:
        """Return how many of `blocks` no snapshot holds."""
        holders = self._num_holders
        return sum(not holders[block] for block in blocks)

    def _check_owned(self, blocks: Sequence[int], what: str) -> None:
        for block in blocks:
            if not 0 <= block < self._num_blocks or not (
                self._num_users[block] or self._num_holders[block]
            ):
                raise self._not_owned(block, what)

    def _not_owned(self, block: int, what: str) -> InvariantError:
        return InvariantError(
            f"block {block} {what} but not in use; pool of {self._num_blocks} has "
            f"{len(self._free)} free"
        )

    def check(self) -> None:
        """Raise `InvariantError` unless free, used and cached blocks add up."""
        used = sum(users > 0 for users in self._num_users)
        cached = sum(
            holders > 0 and not users
            for users, holders in zip(self._num_users, self._num_holders, strict=True)
        )
        num_free = len(set(self._free))
        if (
            num_free != len(self._free)
            or used + cached + num_free != self._num_blocks
            or cached != self._num_cached
        ):
            raise InvariantError(
                f"block pool of {self._num_blocks}: {used} used, {cached} cached (counted "
                f"{self._num_cached}), {len(self._free)} free"
            )
