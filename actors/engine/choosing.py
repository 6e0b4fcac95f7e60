"""How one request chooses its tokens: what its sampling parameters and grammar come to.

Owned by the engine thread, one per request; `append` keeps it in step with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actors.request_channel import Sampling, Submit
from configs.errors import TokenizerMissingError
from model.constraint_vocabulary import Matcher
from model.logit_shaping import LogitShape
from model.sampler import SamplingRow
from model.token_counts import TokenCounts


class Grammars(Protocol):
    """Applies grammars to the model's vocabulary; `model.constraint_vocabulary` does."""

    def matcher(self, grammar: str) -> Matcher:
        """Return what follows one answer; raises `InvalidRequestError`."""

    def masks(self, matchers: Sequence[Matcher]) -> NDArray[np.bool_]:
        """Return the tokens that may come next, `[len(matchers), vocab]`."""


class TokenChoice:
    """The choosing side of one request."""

    def __init__(self, submit: Submit, matcher: Matcher | None) -> None:
        """Prepare, the tokens of earlier attempts included.

        Args:
            submit: Of one answer.
            matcher: Of its grammar, at the begin of an answer; see `make_matcher`.

        Raises:
            InvalidRequestError: The grammar is too complex for tokens of an earlier attempt.
            InvariantError: Tokens of an earlier attempt do not match it.
        """
        sampling = submit.sampling
        self.sampling = sampling
        self.num_logprobs = submit.logprobs
        self.shape = _shape_of(sampling)
        self.counts = TokenCounts(submit.token_ids) if self.shape.needs_counts else None
        self.matcher = matcher
        self._stop_ids = np.asarray(submit.stop_token_ids, dtype=np.int64)
        self._num_answer = 0
        for token_id in submit.generated_ids:
            self.append(token_id)

    @property
    def is_plain(self) -> bool:
        """Whether the logits are taken as they are."""
        return self.shape.is_neutral and self.matcher is None and self.ruled_out is None

    @property
    def ruled_out(self) -> NDArray[np.int64] | None:
        """Tokens that must not come next because the answer is too short; None for none."""
        return self._stop_ids if self._num_answer < self.sampling.min_tokens else None

    @property
    def is_complete(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self.matcher is not None and self.matcher.is_complete

    def row(self, position: int) -> SamplingRow:
        """Return the parameters of the draw of the token at `position`."""
        sampling = self.sampling
        return SamplingRow(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=None if sampling.top_k == 0 else sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            choice=sampling.choice,
            position=position,
        )

    def append(self, token_id: int) -> None:
        """Add a token of the answer.

        Raises:
            InvalidRequestError: The grammar is too complex to go on.
            InvariantError: The grammar does not allow it.
        """
        self._num_answer += 1
        if self.counts is not None:
            self.counts.append(token_id)
        if self.matcher is not None:
            self.matcher.advance(token_id)


def _shape_of(sampling: Sampling) -> LogitShape:
    bias_ids = sorted(sampling.logit_bias)
    return LogitShape(
        bias_ids=np.asarray(bias_ids, dtype=np.int64),
        bias=np.asarray([sampling.logit_bias[token] for token in bias_ids], dtype=np.float32),
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
    )


def make_matcher(submit: Submit, grammars: Grammars | None) -> Matcher | None:
    """Return what follows an answer to `submit`; None without a grammar. For any thread.

    Takes milliseconds for common schemas, 0.3 s for the dearest.

    Raises:
        InvalidRequestError: The grammar cannot be applied.
        TokenizerMissingError: There is a grammar and no vocabulary to apply it to.
    """
    if not submit.grammar:
        return None
    if grammars is None:
        raise TokenizerMissingError(
            "the request has a grammar, but the checkpoint has no tokenizer files; send it "
            "without a constraint"
        )
    return grammars.matcher(submit.grammar)
