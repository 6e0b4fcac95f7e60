"""Flags of `latentmesh generate`, computed in this process, as a user types them."""

from __future__ import annotations

import json
import re

import pytest

from cluster.cli import main
from model.checkpoint_spec import CheckpointSpec
from model.checkpoint_writer import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags") / "checkpoint"
    write_checkpoint(folder, CheckpointSpec(), seed=3)
    return folder


@pytest.fixture
def generate(checkpoint, capsys):
    def run(*args):
        base = ["generate", "Hello", "--checkpoint", str(checkpoint), "--max-tokens", "24"]
        with pytest.raises(SystemExit) as ended:
            main([*base, "--temperature", "1", "--seed", "5", *args])
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run


@pytest.fixture
def told(generate):
    def run(*args):
        code, out, err = generate("--json", *args)
        assert code == 0, err
        return json.loads(out)

    return run


def test_stop_text_ends_the_answer_where_it_begins(told):
    whole = told("--ignore-eos")
    stop = whole["text"][6:8]
    cut = told("--ignore-eos", "--stop", stop)
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert (cut["finish_reason"], cut["matched_stop"]) == ("stop", stop)
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]


def test_several_answers_differ_and_the_first_is_that_of_one(told):
    one = told("--ignore-eos")
    several = told("--ignore-eos", "--n", "3")["choices"]
    assert several[0]["token_ids"] == one["token_ids"]
    assert len({tuple(choice["token_ids"]) for choice in several}) == 3


def test_several_answers_are_printed_one_after_the_other(generate):
    code, out, _ = generate("--ignore-eos", "--n", "2")
    assert code == 0
    assert re.findall(r"^--- answer (\d)$", out, re.MULTILINE) in (["0", "1"], ["1", "0"])


def test_answer_matches_the_regex(told):
    answer = told("--regex", "[a-f]{3,8}")
    assert re.fullmatch("[a-f]{3,8}", answer["text"])
    assert answer["finish_reason"] == "stop"


def test_answer_is_valid_against_the_schema_of_a_file(told, tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"enum": [{"a": 1}, {"a": 2}]}')
    assert json.loads(told("--json-schema", str(file))["text"]) in ({"a": 1}, {"a": 2})


def test_log_probabilities_are_told_of_prompt_and_answer(told):
    answer = told("--logprobs", "2", "--prompt-logprobs", "1")
    assert len(answer["logprobs"]) == len(answer["token_ids"])
    assert all(len(entry["top"]) == 2 for entry in answer["logprobs"])
    assert len(answer["prompt_logprobs"]) == answer["prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--regex", "a", "--json-object"], ["CONFIG_INVALID", "give one"]),
        (["--json-schema", "/absent"], ["CONFIG_INVALID", "/absent"]),
        (["--logit-bias", "3"], ["CONFIG_INVALID", "ID=BIAS"]),
        (["--regex", "("], ["REQUEST_INVALID"]),
        (["--n", "0"], ["num_choices is 0"]),
        (["--stop", ""], ["stop[0] has 0 characters"]),
        (["--min-tokens", "25"], ["min_tokens is 25"]),
        (["--logprobs", "21"], ["logprobs is 21"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_flags_are_refused_with_their_reason(generate, args, words):
    code, _, err = generate(*args)
    assert code != 0
    said = " ".join(err.split())
    for word in words:
        assert word in said
