"""The request of a completion."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cluster.api.openai.request_fields import MAX_COUNT, RequestFields, TopLogprobs
from configs.errors import InvalidRequestError

MAX_PROMPTS = 128
DEFAULT_MAX_TOKENS = 16
"""What OpenAI's API takes."""

TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class CompletionRequest(RequestFields):
    """Request of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
    )
    """A text, token ids, or several of either."""
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_COUNT)] = None
    """Tokens to generate at most; unset is 16."""
    logprobs: TopLogprobs = None
    """Report the log-probability of each token and of so many most likely ones."""
    echo: bool = False
    """Begin the answer with the prompt."""
    best_of: Annotated[int | None, Field(ge=1)] = None
    """Accepted when it equals `n`."""

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]

    def check(self) -> None:
        """Check fields against each other.

        Raises:
            InvalidRequestError: Names them.
        """
        self.check_stream()
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}; answers are not ranked: leave "
                "best_of out"
            )
