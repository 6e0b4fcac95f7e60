"""A name for a model and how it computes, so that memory of one is never taken for another's."""

from __future__ import annotations

import hashlib
from pathlib import Path

from configs.errors import CheckpointError
from configs.numerics import FloatType, Numerics

_EDGE_BYTES = 1 << 16
"""Read at both ends of each file: names, shapes and some weights. All of it would take minutes."""


def fingerprint(
    folder: Path, *, dtype: FloatType, numerics: Numerics, mla_norm_eps: float, num_threads: int
) -> str:
    """Return a hash over a checkpoint and the settings that change its results.

    Args:
        folder: Of the checkpoint.
        dtype: Of weights and activations.
        numerics: Promise of the results.
        mla_norm_eps: As the model is read.
        num_threads: Bits hold for a fixed number.

    Raises:
        CheckpointError: A file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{dtype} {numerics} {mla_norm_eps} {num_threads}".encode())
    try:
        digest.update((folder / "config.json").read_bytes())
        for file in sorted(folder.glob("*.safetensors")):
            num_bytes = file.stat().st_size
            digest.update(f"{file.name} {num_bytes}".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(_EDGE_BYTES))
                stream.seek(max(num_bytes - _EDGE_BYTES, 0))
                digest.update(stream.read(_EDGE_BYTES))
    except OSError as exc:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {exc}") from exc
    return digest.hexdigest()
