"""What an attention worker needs to apply grammars, from its checkpoint."""

from __future__ import annotations

from configs.errors import TokenizerMissingError
from model.checkpoint import Checkpoint
from model.constraint_vocabulary import ConstraintVocabulary
from model.tokenizer import Tokenizer


def load_grammars(checkpoint: Checkpoint) -> ConstraintVocabulary | None:
    """Return the checkpoint's vocabulary for grammars, or None where it has none.

    Raises:
        CheckpointError: The tokenizer files are damaged.
    """
    dims = checkpoint.dims
    try:
        tokenizer = Tokenizer.load(checkpoint.folder)
    except TokenizerMissingError:
        return None
    return ConstraintVocabulary(
        tokenizer, vocab_size=dims.vocab_size, eos_token_ids=dims.eos_token_ids
    )
