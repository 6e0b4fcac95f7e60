"""From what a client asks for to what a worker is told: checks, tokens, stop ids, grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from actors.request_channel import Sampling
from cluster.api.answer_shaper import AnswerShaper, PlainReader, TokenReader
from cluster.api.answers import ChatFormat
from cluster.api.params import GenerateParams, SamplingParams, ScoreParams
from cluster.api.request_spec import Operation, RequestSpec
from cluster.api.stop_scanner import StopTexts
from cluster.api.validation import (
    Limits,
    check_generate,
    check_prompt,
    check_prompt_length,
    check_prompt_logprobs,
    resolve_max_tokens,
)
from configs.errors import (
    InvalidRequestError,
    InvariantError,
    OverloadedError,
    RequestTooLargeError,
    TokenizerMissingError,
)
from model.chat.encode import encode_conversation
from model.chat.parser import ChatParser
from model.chat.values import Conversation
from model.constraint import Constraint, compile_constraint
from model.constraint_vocabulary import ConstraintVocabulary
from model.tokenizer import IncrementalDetokenizer, Tokenizer

CONSTRAINT_TIMEOUT_S: Final = 20.0
"""Longest time that a constraint may take to be checked, and to wait for that."""
MAX_CONSTRAINT_CHECKS: Final = 2
"""Constraints that are checked at a time: prompts are encoded by the same threads."""


class RequestPlanner:
    """Plans requests of one gateway. Slow work runs in threads: all streams share the loop."""

    def __init__(
        self, limits: Limits, tokenizer: Tokenizer | None, *, eos_token_ids: Sequence[int]
    ) -> None:
        """Plan for one model; without a tokenizer, token ids only.

        Takes 1 to 2 s for a vocabulary as large as K3's, and the interpreter's lock: now, because
        later it would hold up every stream.
        """
        self.limits = limits
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: ConstraintVocabulary | None = None
        if tokenizer is not None:
            self._vocabulary = ConstraintVocabulary(
                tokenizer, vocab_size=limits.vocab_size, eos_token_ids=eos_token_ids
            )
        self._free_checks = asyncio.Semaphore(MAX_CONSTRAINT_CHECKS)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            TokenizerMissingError: It has none.
        """
        if self._tokenizer is None:
            raise TokenizerMissingError(
                "the checkpoint has no tokenizer files: send token ids in "
                f"[0, {self.limits.vocab_size})"
            )
        return self._tokenizer

    async def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text; its special tokens are text."""
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """Return the prompt that asks for the next message of a conversation.

        Raises:
            InvalidRequestError: A message makes no sense; names it.
        """
        return await asyncio.to_thread(encode_conversation, conversation, self.tokenizer)

    async def plan_generate(
        self, params: GenerateParams, *, timeout_s: float | None, worker_tokens: int
    ) -> RequestSpec:
        """Return what a worker is asked for.

        Args:
            params: Checked here.
            timeout_s: Seconds left of the client's deadline; None has none.
            worker_tokens: Tokens of prompt and answer that the roomiest worker can hold.

        Raises:
            AdmissionError: The request is refused.
        """
        prompt = check_generate(params, self.limits)
        token_ids = await self._token_ids(prompt)
        max_tokens = resolve_max_tokens(
            len(token_ids), params, self.limits, worker_tokens=worker_tokens
        )
        check_prompt_logprobs(len(token_ids), params)
        grammar = ""
        if params.constraint is not None:
            grammar = await self._grammar(params.constraint)
        own_stops = () if params.stop.ignore_eos else self._eos_token_ids
        return RequestSpec(
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=self._sampling(params.sampling, min_tokens=params.stop.min_tokens),
            seed=params.sampling.seed,
            stop_token_ids=list(dict.fromkeys((*own_stops, *params.stop.token_ids))),
            timeout_s=timeout_s,
            num_choices=params.num_choices,
            priority=params.priority,
            grammar=grammar,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    async def plan_score(
        self, params: ScoreParams, *, timeout_s: float | None, worker_tokens: int
    ) -> RequestSpec:
        """Return what a worker is asked for; see `plan_generate`."""
        prompt = check_prompt(params.model, params.prompt, self.limits)
        token_ids = await self._token_ids(prompt)
        check_prompt_length(len(token_ids), self.limits, num_reserved=0)
        if len(token_ids) > worker_tokens:
            raise RequestTooLargeError(
                f"prompt has {len(token_ids)} tokens; {worker_tokens} fit a worker's memory; "
                "shorten it, or raise attention_pool.num_blocks"
            )
        return RequestSpec(
            token_ids=token_ids,
            max_tokens=0,
            sampling=Sampling(),
            seed=0,
            stop_token_ids=[],
            timeout_s=timeout_s,
            operation=Operation.SCORE,
        )

    def make_shapers(
        self, params: GenerateParams, spec: RequestSpec, chat: ChatFormat | None
    ) -> list[AnswerShaper]:
        """Return what makes chunks of the tokens of each choice."""
        stop_ids, stop_texts = frozenset(spec.stop_token_ids), StopTexts(params.stop.texts)
        return [
            AnswerShaper(
                self._make_reader(chat),
                stop_ids=stop_ids,
                stop_texts=stop_texts,
                min_tokens=params.stop.min_tokens,
                includes_stop_text=params.stop.include_text,
                choice=choice,
                resume_offset=params.resume_offset,
                is_chat=chat is not None,
            )
            for choice in range(spec.num_choices)
        ]

    def _make_reader(self, chat: ChatFormat | None) -> TokenReader | None:
        if chat is not None:
            return ChatParser(self.tokenizer, thinking=chat.thinking)
        if self._tokenizer is None:
            return None
        return PlainReader(IncrementalDetokenizer(self._tokenizer))

    async def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self._tokenizer is None:
            raise InvariantError("text passed validation without a tokenizer")
        return await self.encode_text(prompt)

    async def _grammar(self, constraint: Constraint) -> str:
        try:
            async with asyncio.timeout(CONSTRAINT_TIMEOUT_S):
                await self._free_checks.acquire()
        except TimeoutError as exc:
            raise OverloadedError(
                f"constraints of other requests were checked for {CONSTRAINT_TIMEOUT_S:g} s; retry "
                "later"
            ) from exc
        loop = asyncio.get_running_loop()
        checking = loop.run_in_executor(None, self._checked_grammar, constraint)
        # Only when the thread is free again, which a caller that leaves does not wait for.
        checking.add_done_callback(self._on_checked)
        try:
            async with asyncio.timeout(CONSTRAINT_TIMEOUT_S):
                return await asyncio.shield(checking)
        except TimeoutError as exc:
            raise InvalidRequestError(
                f"the constraint of {len(constraint.text)} characters was not checked within "
                f"{CONSTRAINT_TIMEOUT_S:g} s; simplify it"
            ) from exc

    def _on_checked(self, checking: asyncio.Future[str]) -> None:
        self._free_checks.release()
        if not checking.cancelled():
            # Taken note of, also where nobody waits for it any more.
            checking.exception()

    def _checked_grammar(self, constraint: Constraint) -> str:
        if self._vocabulary is None:
            raise InvariantError("a constraint passed validation without a tokenizer")
        grammar = compile_constraint(constraint)
        self._vocabulary.check(grammar)
        return grammar

    def _sampling(self, params: SamplingParams, *, min_tokens: int) -> Sampling:
        # More than the vocabulary keeps all of it, as 0 does.
        top_k = 0 if params.top_k is None else min(params.top_k, self.limits.vocab_size)
        return Sampling(
            temperature=_or(params.temperature, 0.0),
            top_p=_or(params.top_p, 1.0),
            top_k=top_k,
            min_p=_or(params.min_p, 0.0),
            repetition_penalty=_or(params.repetition_penalty, 1.0),
            presence_penalty=_or(params.presence_penalty, 0.0),
            frequency_penalty=_or(params.frequency_penalty, 0.0),
            logit_bias=dict(params.logit_bias),
            min_tokens=min_tokens,
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
