"""`latentmesh generate`: continue a prompt, computed in this process or on a server."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from cluster.api.params import GenerateParams, SamplingParams, StopParams
from cluster.cli.answer_printing import AnswerPrinter
from cluster.cli.connection import connect
from cluster.cli.generate_options import (
    ChoiceOption,
    FrequencyPenaltyOption,
    GrammarOption,
    IgnoreEosOption,
    IncludeStopOption,
    JsonObjectOption,
    JsonOption,
    JsonSchemaOption,
    LogitBiasOption,
    LogprobsOption,
    MaxTokensOption,
    MinPOption,
    MinTokensOption,
    NumChoicesOption,
    PresencePenaltyOption,
    PriorityOption,
    PromptLogprobsOption,
    RegexOption,
    RepetitionPenaltyOption,
    SeedOption,
    StopOption,
    StopTokenIdOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    biases_of,
    constraint_of,
)
from cluster.cli.prompt import (
    CheckpointOption,
    ComputeDtypeOption,
    NumericsOption,
    PromptArgument,
    ServerOption,
    TokenIdsOption,
    check_place,
    local_module,
    parse_prompt,
)
from configs.numerics import FloatType, Numerics

DEFAULT_MAX_TOKENS = 64


def generate(  # noqa: PLR0913 - one parameter per flag
    prompt: PromptArgument = None,
    *,
    token_ids: TokenIdsOption = None,
    checkpoint: CheckpointOption = None,
    server: ServerOption = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds, with --server.")] = None,
    priority: PriorityOption = 0,
    compute_dtype: ComputeDtypeOption = FloatType.FLOAT32,
    numerics: NumericsOption = Numerics.FAST,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    min_p: MinPOption = 0.0,
    repetition_penalty: RepetitionPenaltyOption = 1.0,
    presence_penalty: PresencePenaltyOption = 0.0,
    frequency_penalty: FrequencyPenaltyOption = 0.0,
    logit_bias: LogitBiasOption = None,
    seed: SeedOption = None,
    num_choices: NumChoicesOption = 1,
    max_tokens: MaxTokensOption = DEFAULT_MAX_TOKENS,
    min_tokens: MinTokensOption = 0,
    stop: StopOption = None,
    stop_token_ids: StopTokenIdOption = None,
    include_stop: IncludeStopOption = False,
    ignore_eos: IgnoreEosOption = False,
    json_schema: JsonSchemaOption = None,
    json_object: JsonObjectOption = False,
    regex: RegexOption = None,
    grammar: GrammarOption = None,
    choices: ChoiceOption = None,
    logprobs: LogprobsOption = None,
    prompt_logprobs: PromptLogprobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt and print the answer as it comes."""
    check_place(checkpoint, server)
    params = GenerateParams(
        prompt=parse_prompt(prompt, token_ids),
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=biases_of(logit_bias),
            seed=seed,
        ),
        stop=StopParams(
            texts=tuple(stop or ()),
            token_ids=tuple(stop_token_ids or ()),
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
            include_text=include_stop,
        ),
        num_choices=num_choices,
        constraint=constraint_of(
            json_schema=json_schema,
            json_object=json_object,
            regex=regex,
            grammar=grammar,
            choices=choices,
        ),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=priority,
    )
    printer = AnswerPrinter(num_choices=max(num_choices, 1), is_silent=as_json)
    if server is not None:
        with connect(server) as client:
            for event in client.generate(params, timeout_s=timeout):
                printer.show(event)
    elif checkpoint is not None:
        local_module().generate_here(params, checkpoint, compute_dtype, numerics, printer.show)
    if as_json:
        typer.echo(json.dumps(printer.to_json(), indent=2))
        return
    printer.print_summary()
