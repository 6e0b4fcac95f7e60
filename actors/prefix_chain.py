"""Names of prefixes: a chain of hashes over whole blocks of tokens.

A worker names its cached prefixes by them, and a gateway finds which worker holds most of a prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 16


def chain_keys(token_ids: Sequence[int] | NDArray[np.int32], block_tokens: int) -> Iterator[bytes]:
    """Yield the key of the first block, of the first two blocks, and so on; lazily.

    Each key is a hash of the key before it and the tokens of its block, so equal keys mean equal
    prefixes. A block that is not full has none.

    Args:
        token_ids: int32 values; a worker negates what was computed in decode form.
        block_tokens: Tokens per block, at least 1.
    """
    tokens = np.asarray(token_ids, dtype="<i4")
    key = b""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tokens[start : start + block_tokens].tobytes()
        key = hashlib.blake2b(key + block, digest_size=KEY_BYTES).digest()
        yield key
