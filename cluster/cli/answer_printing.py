"""Answers on a terminal, in a pipe, and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from actors.request_channel import TokenLogprobs, Usage
from cluster.api.answers import Chunk, Finished
from configs.errors import InvariantError
from configs.numerics import FinishReason


@dataclass
class _Answer:
    """What came of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def end(self) -> Finished:
        """How it ended."""
        if self.finished is None:
            raise InvariantError("an answer ended without `finished`")
        return self.finished


class AnswerPrinter:
    """Collects answers and, unless they are printed as JSON, shows them.

    One answer is shown as it comes, several each when it has ended.
    """

    def __init__(self, *, num_choices: int, is_silent: bool) -> None:
        self._answers = [_Answer() for _ in range(num_choices)]
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._is_silent = is_silent

    def show(self, event: Chunk | Finished) -> None:
        """Take one event."""
        answer = self._answers[event.choice]
        if isinstance(event, Finished):
            answer.finished = event
            if not self._is_silent:
                self._show_end(answer)
            return
        answer.token_ids.extend(event.token_ids)
        answer.text += event.text
        answer.logprobs.extend(event.logprobs)
        self._prompt_logprobs.extend(event.prompt_logprobs)
        if not self._is_silent and len(self._answers) == 1:
            _write(event.text)

    def to_json(self) -> dict[str, Any]:
        """Return everything; of several answers a list, of one its own fields."""
        choices = [_to_json(answer) for answer in self._answers]
        told: dict[str, Any] = choices[0] if len(choices) == 1 else {"choices": choices}
        if self._prompt_logprobs:
            told["prompt_logprobs"] = _logprobs_to_json(self._prompt_logprobs)
        return told

    def print_summary(self) -> None:
        """One dim line per answer for people, not in pipes."""
        console = Console(stderr=True, highlight=False)
        if console.is_terminal:
            for answer in self._answers:
                console.print(f"[dim]{_summary(answer)}[/dim]", markup=True)

    def _show_end(self, answer: _Answer) -> None:
        if len(self._answers) > 1:
            sys.stdout.write(f"--- answer {answer.end.choice}\n")
            _write(answer.text)
        if not answer.text:
            sys.stdout.write(",".join(map(str, answer.token_ids)))
        sys.stdout.write("\n")
        sys.stdout.flush()


def _to_json(answer: _Answer) -> dict[str, Any]:
    end, rate = answer.end, _rate(answer.end.usage)
    told: dict[str, Any] = {
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": end.finish_reason.value,
        "matched_stop": end.matched_stop,
        "prompt_tokens": end.usage.prompt_tokens,
        "seed": end.seed,
        "timings": {
            "queue_s": round(end.usage.queue_s, 6),
            "first_token_s": round(end.usage.first_token_s, 6),
            "total_s": round(end.usage.total_s, 6),
            "tokens_per_s": None if rate is None else round(rate, 3),
        },
    }
    if answer.logprobs:
        told["logprobs"] = _logprobs_to_json(answer.logprobs)
    return told


def _logprobs_to_json(entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "logprob": entry.logprob,
            "top": [
                {"token_id": token_id, "logprob": logprob}
                for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]


def _rate(usage: Usage) -> float | None:
    """Tokens per second after the first; None when there is only one."""
    later_s = usage.total_s - usage.first_token_s
    if usage.output_tokens < 2 or later_s <= 0:
        return None
    return (usage.output_tokens - 1) / later_s


def _summary(answer: _Answer) -> str:
    usage, rate = answer.end.usage, _rate(answer.end.usage)
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    return (
        f"{usage.prompt_tokens} prompt tokens, {len(answer.token_ids)} generated "
        f"({_reason(answer.end)}); first after {usage.first_token_s:.3f} s{speed}; seed "
        f"{answer.end.seed}"
    )


def _reason(end: Finished) -> str:
    if end.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    match end.matched_stop:
        case str():
            return "stop text"
        case int():
            return "end token"
        case _:
            return "constraint complete"


def _write(text: str) -> None:
    sys.stdout.write(_printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters become middle dots."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in text)
