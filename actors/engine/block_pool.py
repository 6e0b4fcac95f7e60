"""Which request owns which block of the MLA cache. Ids only; the tensors are `model.cache`'s.

A block may be shared by several requests once nobody writes it any more. Invariant: every block is
free, or used by as many requests as its count says; `num_free + num_used == num_blocks`.
"""

from __future__ import annotations

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

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one request uses."""
        return self._num_blocks - len(self._free)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Hand out `num_blocks` blocks, all or none.

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
            InvariantError: One of them is not in use; none is counted.
        """
        self._check_used(blocks, "shared")
        for block in blocks:
            self._num_users[block] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take one user off each block; a block without any is free.

        Raises:
            InvariantError: One of them is unknown or already free; none is taken back.
        """
        self._check_used(blocks, "freed")
        if len(set(blocks)) != len(blocks):
            raise InvariantError(f"blocks freed twice in one call: {list(blocks)}")
        for block in blocks:
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._free.append(block)

    def _check_used(self, blocks: Sequence[int], what: str) -> None:
        for block in blocks:
            if not 0 <= block < self._num_blocks or not self._num_users[block]:
                raise InvariantError(
                    f"block {block} {what} but not in use; pool of {self._num_blocks} has "
                    f"{len(self._free)} free"
                )

    def check(self) -> None:
        """Raise `InvariantError` unless free and used blocks add up."""
        num_marked = sum(users > 0 for users in self._num_users)
        if len(set(self._free)) != len(self._free) or num_marked + len(self._free) != (
            self._num_blocks
        ):
            raise InvariantError(
                f"block pool of {self._num_blocks}: {num_marked} used, {len(self._free)} free"
            )
