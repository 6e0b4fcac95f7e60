"""Flags of `latentmesh generate`, in the groups that its help shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

import typer

from configs.errors import ConfigError
from model.constraint import Constraint, ConstraintKind

_SAMPLING: Final = "Sampling"
_ENDING: Final = "Where the answer ends"
_SHAPE: Final = "What the answer must match (give one at most)"
_REPORT: Final = "What is reported"

TemperatureOption = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)]
TopPOption = Annotated[
    float, typer.Option(help="Nucleus mass, at most 1.", rich_help_panel=_SAMPLING)
]
TopKOption = Annotated[int, typer.Option(help="0 keeps all.", rich_help_panel=_SAMPLING)]
MinPOption = Annotated[
    float,
    typer.Option(help="Least share of the likeliest token.", rich_help_panel=_SAMPLING),
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(help="1 is none.", rich_help_panel=_SAMPLING)
]
PresencePenaltyOption = Annotated[float, typer.Option(help="-2 to 2.", rich_help_panel=_SAMPLING)]
FrequencyPenaltyOption = Annotated[float, typer.Option(help="-2 to 2.", rich_help_panel=_SAMPLING)]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Repeatable.", rich_help_panel=_SAMPLING),
]
SeedOption = Annotated[
    int | None, typer.Option(help="Drawn when not given.", rich_help_panel=_SAMPLING)
]
NumChoicesOption = Annotated[
    int, typer.Option("--n", help="Answers to the prompt.", rich_help_panel=_SAMPLING)
]
MaxTokensOption = Annotated[int, typer.Option(help="Tokens to generate.", rich_help_panel=_ENDING)]
MinTokensOption = Annotated[
    int, typer.Option(help="No end before so many.", rich_help_panel=_ENDING)
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", help="Text that ends the answer. Repeatable.", rich_help_panel=_ENDING),
]
StopTokenIdOption = Annotated[
    list[int] | None,
    typer.Option("--stop-token-id", help="Repeatable.", rich_help_panel=_ENDING),
]
IncludeStopOption = Annotated[
    bool,
    typer.Option("--include-stop", help="Keep the stop text.", rich_help_panel=_ENDING),
]
IgnoreEosOption = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on at end tokens.", rich_help_panel=_ENDING)
]
PriorityOption = Annotated[int, typer.Option(help="-100 to 100; lower is served earlier.")]
JsonSchemaOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A JSON Schema.", rich_help_panel=_SHAPE)
]
JsonObjectOption = Annotated[
    bool, typer.Option("--json-object", help="Any JSON object.", rich_help_panel=_SHAPE)
]
RegexOption = Annotated[
    str | None, typer.Option(help="Matches the whole answer.", rich_help_panel=_SHAPE)
]
GrammarOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Lark or GBNF.", rich_help_panel=_SHAPE)
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option("--choice", help="One of these texts. Repeatable.", rich_help_panel=_SHAPE),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(help="Also of so many likeliest tokens; with --json.", rich_help_panel=_REPORT),
]
PromptLogprobsOption = Annotated[
    int | None, typer.Option(help="The same for the prompt.", rich_help_panel=_REPORT)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for machines.", rich_help_panel=_REPORT)
]


def constraint_of(
    *,
    json_schema: Path | None,
    json_object: bool,
    regex: str | None,
    grammar: Path | None,
    choices: list[str] | None,
) -> Constraint | None:
    """Return the one constraint that was given, or None.

    Raises:
        ConfigError: Several were given, or a file cannot be read.
    """
    found: list[Constraint] = []
    if json_schema is not None:
        found.append(Constraint(ConstraintKind.JSON_SCHEMA, _read(json_schema, "--json-schema")))
    if json_object:
        found.append(Constraint(ConstraintKind.JSON_OBJECT))
    if regex is not None:
        found.append(Constraint(ConstraintKind.REGEX, regex))
    if grammar is not None:
        found.append(Constraint(ConstraintKind.GRAMMAR, _read(grammar, "--grammar")))
    if choices:
        found.append(Constraint(ConstraintKind.CHOICE, json.dumps(choices)))
    if len(found) > 1:
        names = ", ".join(constraint.kind.value for constraint in found)
        raise ConfigError(f"several constraints were given ({names}); give one")
    return found[0] if found else None


def biases_of(pairs: list[str] | None) -> dict[int, float]:
    """Return biases by token id.

    Raises:
        ConfigError: A pair is not ID=BIAS.
    """
    try:
        return {
            int(token): float(bias) for token, bias in (pair.split("=") for pair in pairs or [])
        }
    except ValueError as exc:
        raise ConfigError(f"--logit-bias {pairs} is not ID=BIAS each, e.g. 42=-100") from exc


def _read(file: Path, flag: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag} {file} cannot be read: {exc}; give a UTF-8 file") from exc
