"""Grammars applied to a vocabulary: which tokens may come next.

A thin layer over llguidance. `-1` in a mask of int32 words allows 32 tokens, as llguidance has it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from configs.errors import InvariantError
from model.constraint import refusal_of
from model.tokenizer import Tokenizer

PARSER_LIMITS: Final = LLParserLimits(
    # Enough for an object with 450 properties, any of which may be left out. With five times as
    # many, a hostile grammar takes 0.2 s for each token.
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    # It runs over the whole vocabulary before the first token, seconds for K3's.
    precompute_large_lexemes=False,
    # Else errors carry the parser's state, longer than any status may be.
    verbose_errors=False,
)
"""A grammar that needs more is refused, or ends its request with an error when it gets there."""

_MISMATCH: Final = "satisfy the grammar"
"""In llguidance's reason for a token that is not allowed; other reasons are limits."""
_OUTER: Final = '%llguidance {"no_forcing": true}\nstart: @answer'
"""Holds the request's grammar. Without `no_forcing` all text that leaves no choice is worked out
and tokenised before each token: 3 s for 50,000 letters, for ever for `a{1000000000}`. No directive
of the inner grammar switches it on again."""


class ConstraintVocabulary:
    """The vocabulary of one checkpoint, prepared for grammars. May be used by several threads.

    Preparing takes about a second for a vocabulary as large as K3's.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Prepare.

        Args:
            tokenizer: Names of its special tokens may stand in grammars, as `<|close|>`.
            vocab_size: Logits of a row; tokens beyond the tokenizer's are never allowed.
            eos_token_ids: Allowed where a grammar is satisfied. Without any, an answer ends where
                its grammar allows nothing more.
        """
        ends = [token for token in eos_token_ids if token < tokenizer.vocab_size]
        self.vocab_size = vocab_size
        self._eos_token_ids = frozenset(ends)
        self._num_known = tokenizer.vocab_size
        self._tokenizer: LLTokenizer = LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]
            encoder=tokenizer.ranks,
            special_tokens=dict(tokenizer.special_ids),
            pattern=tokenizer.pattern,
            # llguidance needs one: in place of none, the last special token, never allowed.
            eos_token=ends or [tokenizer.vocab_size - 1],
            n_vocab=tokenizer.vocab_size,
            slices=None,
        )
        self._executor = LLExecutor(num_threads=1)

    def check(self, grammar: str) -> None:
        """Refuse a grammar that cannot be applied.

        Raises:
            InvalidRequestError: Says why.
        """
        matcher = self._make(grammar)
        # The first mask costs most, and shows grammars that no text matches.
        mask = allocate_token_bitmask(1, self._num_known)
        fill_next_token_bitmask_par(self._executor, [(matcher, 0)], mask)
        if matcher.is_error():
            raise refusal_of("the grammar", matcher.get_error())
        if not mask.any():
            raise refusal_of("the grammar", "no text matches it")

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the begin of an answer.

        Raises:
            InvalidRequestError: The grammar cannot be applied.
        """
        return Matcher(self._make(grammar), self._eos_token_ids)

    def masks(self, matchers: Sequence[Matcher]) -> NDArray[np.bool_]:
        """Return the tokens that may come next, `[len(matchers), vocab_size]`.

        A matcher that fails here allows nothing; see `Matcher.error`.
        """
        words = allocate_token_bitmask(len(matchers), self._num_known)
        pairs = [(matcher.inner, index) for index, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, pairs, words)
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
        allowed = np.zeros((len(matchers), self.vocab_size), dtype=np.bool_)
        num_known = min(self._num_known, self.vocab_size)
        if not self._eos_token_ids:
            num_known = min(num_known, self._num_known - 1)
        allowed[:, :num_known] = bits[:, :num_known]
        return allowed

    def _make(self, grammar: str) -> LLMatcher:
        whole = _without_forcing(grammar)
        matcher = LLMatcher(self._tokenizer, whole, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():
            raise refusal_of("the grammar", matcher.get_error())
        return matcher


def _without_forcing(grammar: str) -> str:
    """Return a grammar, Lark or llguidance's JSON, within `_OUTER`."""
    inner: dict[str, object] = {"lark_grammar": grammar}
    others: list[object] = []
    if grammar.startswith("{"):
        try:
            first, *others = json.loads(grammar)["grammars"]
            inner = dict(first)
        except (ValueError, LookupError, TypeError, RecursionError) as exc:
            raise refusal_of("the grammar", "it is not llguidance's") from exc
    named = {**inner, "name": "answer"}
    return json.dumps({"grammars": [{"lark_grammar": _OUTER}, named, *others]})


class Matcher:
    """Follows one answer. Owned by one thread."""

    def __init__(self, inner: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        """Use `ConstraintVocabulary.matcher`."""
        self.inner = inner
        self._eos_token_ids = eos_token_ids

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self.inner.is_stopped() and not self.inner.is_error()

    @property
    def error(self) -> str:
        """Why it cannot go on; "" while it can."""
        return self.inner.get_error() if self.inner.is_error() else ""

    def advance(self, token_id: int) -> None:
        """Add a token of the answer.

        Raises:
            InvalidRequestError: The grammar needs more than `PARSER_LIMITS` there.
            InvariantError: The grammar does not allow it.
        """
        if token_id in self._eos_token_ids and self.inner.is_accepting():
            return
        if self.inner.consume_token(token_id):
            return
        reason = self.error
        if _MISMATCH in reason or not reason:
            raise InvariantError(f"token {token_id} does not match the answer's grammar: {reason}")
        raise refusal_of("the grammar", reason)
