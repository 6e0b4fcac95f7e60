"""Whatever a model with random weights would say, under a constraint it says something valid."""

import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest
import torch

from actors.engine.request import RequestKey
from actors.request_channel import Sampling, Submit
from actors.single_process import SingleProcess, SingleProcessSettings
from configs.numerics import Numerics
from model.constraint import Constraint, ConstraintKind, compile_constraint
from model.tokenizer import Tokenizer
from model.tokenizer_files import END_OF_MESSAGE, special_id
from tests.fakes.text_checkpoint import write_text_checkpoint

NUM_SCHEMAS = 200
NUM_SLOTS = 25
MAX_TOKENS = 400
END = special_id(END_OF_MESSAGE)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_text_checkpoint(tmp_path_factory.mktemp("text") / "checkpoint")


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.load(checkpoint.folder)


def make_process(checkpoint, *, num_slots, numerics=Numerics.FAST):
    torch.set_num_threads(1)
    return SingleProcess(
        checkpoint,
        SingleProcessSettings(
            max_request_tokens=MAX_TOKENS + 64, num_state_slots=num_slots, numerics=numerics
        ),
    )


def random_schema(draw, depth=0):
    """A schema whose values are short: a random model closes a string or a list by chance only."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern"]
    kinds += ["object", "array", "union"] if depth < 3 else []
    match draw.choice(kinds if depth else ["object", "array", "union", "object"]):
        case "string":
            low = draw.randint(0, 2)
            return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": "^[a-f]{2,4}$"}
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": draw.randint(1, 9)}
        case "enum":
            return {"enum": draw.sample(["a", "b\u00e9", 3, None, True, "\u20ac \\"], 3)}
        case "object":
            names = draw.sample(["a", "b", "na\u00efve", "with space", "$ref2", "x" * 20], 3)
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth + 1) for name in names},
                "required": draw.sample(names, draw.randint(0, 3)),
                "additionalProperties": False,
            }
        case "array":
            low = draw.randint(0, 1)
            items = random_schema(draw, depth + 1)
            high = low + draw.randint(0, 2)
            return {"type": "array", "items": items, "minItems": low, "maxItems": high}
        case "union":
            return {"anyOf": [random_schema(draw, depth + 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


def submit_of(name, grammar, *, seed, prompt=(1, 2, 3), **changes):
    values = {
        "request_id": name,
        "attempt": 0,
        "token_ids": list(prompt),
        "max_tokens": MAX_TOKENS,
        "sampling": Sampling(temperature=1.0, seed=seed),
        "stop_token_ids": [END],
        "grammar": grammar,
    }
    return Submit(**{**values, **changes})


def answers_of(process, submits):
    """Token ids by request, and log-probabilities by request."""
    tokens, logprobs = {}, {}
    for outcome in process.run(submits):
        for news in outcome.tokens:
            key = RequestKey(news.request_id, news.attempt)
            tokens.setdefault(key.request_id, []).extend(news.token_ids)
            logprobs.setdefault(key.request_id, []).extend(news.logprobs)
    return tokens, logprobs


def test_200_random_json_schemas_are_all_obeyed(checkpoint, tokenizer):
    draw = random.Random(3)
    schemas = [random_schema(draw) for _ in range(NUM_SCHEMAS)]
    submits = []
    for index, schema in enumerate(schemas):
        text = json.dumps(schema)
        grammar = compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, text))
        submits.append(submit_of(f"r{index}", grammar, seed=index))
    with make_process(checkpoint, num_slots=NUM_SLOTS) as process:
        tokens, _ = answers_of(process, submits)
    for index, schema in enumerate(schemas):
        text = tokenizer.decode(tokens[f"r{index}"])
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("kind", "text", "is_valid"),
    [
        pytest.param(ConstraintKind.REGEX, "[0-9]{3}-x+", lambda t: t[3] == "-", id="regex"),
        pytest.param(ConstraintKind.CHOICE, '["yes", "no"]', lambda t: t in "yes no", id="choice"),
        pytest.param(ConstraintKind.JSON_OBJECT, "", lambda t: t[0] == "{", id="object"),
        pytest.param(
            ConstraintKind.GRAMMAR, 'start: "a" ("b" | "c")', lambda t: t in "ab ac", id="lark"
        ),
        pytest.param(ConstraintKind.GRAMMAR, 'root ::= "u" "v"', lambda t: t == "uv", id="gbnf"),
    ],
)
def test_each_kind_of_constraint_is_obeyed(checkpoint, tokenizer, kind, text, is_valid):
    grammar = compile_constraint(Constraint(kind, text))
    with make_process(checkpoint, num_slots=1) as process:
        tokens, _ = answers_of(process, [submit_of("r", grammar, seed=5, max_tokens=60)])
    assert is_valid(tokenizer.decode(tokens["r"]))


def test_special_tokens_of_a_grammar_are_the_special_tokens(checkpoint):
    grammar = compile_constraint(Constraint(ConstraintKind.GRAMMAR, 'start: "t" <|close|> "u"'))
    with make_process(checkpoint, num_slots=1) as process:
        tokens, _ = answers_of(process, [submit_of("r", grammar, seed=5)])
    assert tokens["r"][:3] == [ord("t"), special_id("<|close|>"), ord("u")]


def test_a_replayed_answer_goes_on_within_its_grammar(checkpoint, tokenizer):
    schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}'
    grammar = compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, schema))
    with make_process(checkpoint, num_slots=1, numerics=Numerics.INVARIANT) as process:
        whole, _ = answers_of(process, [submit_of("r", grammar, seed=5)])
        head = whole["r"][: len(whole["r"]) // 2]
        rest, _ = answers_of(process, [submit_of("s", grammar, seed=5, generated_ids=head)])
    assert head + rest["s"] == whole["r"]


def test_choices_seeds_and_logprobs_do_not_depend_on_what_else_runs(checkpoint):
    grammar = compile_constraint(Constraint(ConstraintKind.REGEX, "[a-z]{5,30}"))
    shaped = Sampling(
        temperature=0.9, seed=11, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={101: 2.0}, min_tokens=4,
    )  # fmt: skip

    def wanted(name, **changes):
        values = {"sampling": shaped, "max_tokens": 24, "logprobs": 3, **changes}
        return submit_of(name, grammar, seed=0, prompt=range(40), **values)

    with make_process(checkpoint, num_slots=8, numerics=Numerics.INVARIANT) as process:
        others = [
            submit_of(
                f"o{i}", "", seed=i, prompt=range(7 * i + 1), max_tokens=30, stop_token_ids=[]
            )
            for i in range(4)
        ]
        together = answers_of(process, [*others, wanted("r", num_choices=4)])
        for choice, name in enumerate(["r", "r.1", "r.2", "r.3"]):
            alone = answers_of(
                process, [wanted("a", sampling=msgspec.structs.replace(shaped, choice=choice))]
            )
            assert alone[0]["a"] == together[0][name]
            assert alone[1]["a"] == together[1][name]
    assert len({tuple(together[0][name]) for name in ("r", "r.1", "r.2", "r.3")}) == 4


def test_logprobs_of_a_prompt_are_those_of_its_score(checkpoint):
    prompt = list(range(50))
    with make_process(checkpoint, num_slots=1) as process:
        logits = process.score(prompt).astype(np.float64)
        found = {}
        submit = submit_of("r", "", seed=0, prompt=prompt, max_tokens=1, prompt_logprobs=2)
        for outcome in process.run([submit]):
            for news in outcome.prompt_logprobs:
                found.update(enumerate(news.logprobs, news.first_position))
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    assert sorted(found) == list(range(1, 50))
    for position, entry in found.items():
        row = logprobs[position - 1]
        assert entry.logprob == pytest.approx(row[prompt[position]], abs=1e-6)
        assert entry.top_ids == np.argsort(-row, kind="stable")[:2].tolist()
