"""The special tokens that carry the structure of K3's chat format."""

from __future__ import annotations

from dataclasses import dataclass

from configs.errors import CheckpointError
from model.tokenizer import Tokenizer
from model.tokenizer_files import END_OF_MESSAGE

OPEN = "<|open|>"
"""Starts the opening of an element: name and attributes follow as text, then `SEP`."""
CLOSE = "<|close|>"
"""Starts the closing of an element."""
SEP = "<|sep|>"
"""Ends an opening or a closing."""


@dataclass(frozen=True, slots=True)
class MarkerIds:
    """Ids of the markers in one vocabulary."""

    open: int
    close: int
    sep: int
    end_of_message: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MarkerIds:
        """Find the markers of a vocabulary.

        Raises:
            CheckpointError: The vocabulary lacks one of them, so it has no chat format.
        """
        found = tokenizer.special_ids
        for name in (OPEN, CLOSE, SEP, END_OF_MESSAGE):
            if name not in found:
                raise CheckpointError(
                    f"the tokenizer names no special token {name}: chat needs K3's vocabulary; "
                    "copy tokenizer_config.json of the release, or send token ids"
                )
        return cls(found[OPEN], found[CLOSE], found[SEP], found[END_OF_MESSAGE])
