import json

import numpy as np
import pytest

from configs.errors import InvalidRequestError
from model.constraint import Constraint, ConstraintKind, compile_constraint
from model.constraint_vocabulary import ConstraintVocabulary
from model.tokenizer import Tokenizer
from model.tokenizer_files import BYTE_VOCAB_SIZE, END_OF_MESSAGE, special_id, write_tokenizer_files

END = special_id(END_OF_MESSAGE)
SCHEMA, REGEX = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX
GRAMMAR, CHOICE = ConstraintKind.GRAMMAR, ConstraintKind.CHOICE


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer_files(folder)
    tokenizer = Tokenizer.load(folder)
    return ConstraintVocabulary(tokenizer, vocab_size=BYTE_VOCAB_SIZE + 7, eos_token_ids=[END])


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        pytest.param(SCHEMA, "{", "not JSON", id="half JSON"),
        pytest.param(SCHEMA, "[" * 5000, "not JSON", id="deep JSON"),
        pytest.param(SCHEMA, '{"minimum": NaN}', "NaN", id="NaN"),
        pytest.param(SCHEMA, "3", "expected an object", id="number"),
        pytest.param(SCHEMA, r'{"const": "\ud800"}', "surrogate", id="half a surrogate pair"),
        pytest.param(SCHEMA, r'{"properties": {"\udfff": {}}}', "surrogate", id="half a name"),
        pytest.param(SCHEMA, '{"type": "foo"}', "foo", id="unknown type"),
        pytest.param(SCHEMA, '{"not": {}}', "not", id="unimplemented key"),
        pytest.param(SCHEMA, '{"$ref": "#/x"}', "/x", id="dangling reference"),
        pytest.param(SCHEMA, '{"$ref": "http://x/y"}', "http://x/y", id="foreign reference"),
        pytest.param(REGEX, "(", "unclosed", id="half regex"),
        pytest.param(REGEX, "a(?=b)", "look-ahead", id="look-ahead"),
        pytest.param(REGEX, " ", "empty", id="empty regex"),
        pytest.param(REGEX, "(" * 3000 + "a" + ")*" * 3000, "cannot be used", id="nested regex"),
        pytest.param(
            GRAMMAR, "start: /(.*a.{12})/ & /(.*b.{13})/", "cannot be used", id="intersection"
        ),
        pytest.param(GRAMMAR, "start: foo", "foo", id="unknown rule"),
        pytest.param(GRAMMAR, "start: <|nope|>", "nope", id="unknown special token"),
        pytest.param(CHOICE, '"a"', "no list", id="no list"),
        pytest.param(CHOICE, "[]", "1 to 1000", id="no choices"),
        pytest.param(CHOICE, '["a", ""]', "empty", id="empty choice"),
        pytest.param(CHOICE, json.dumps(["a"] * 1001), "1001", id="many choices"),
        pytest.param(REGEX, "a" * 70000, "65536", id="long"),
    ],
)
def test_what_cannot_be_applied_is_refused_with_a_reason(vocabulary, kind, text, words):
    with pytest.raises(InvalidRequestError) as caught:
        vocabulary.check(compile_constraint(Constraint(kind, text)))
    assert words in caught.value.message
    assert len(caught.value.message) < 500


def test_the_end_is_allowed_exactly_where_the_grammar_is_satisfied(vocabulary):
    matcher = vocabulary.matcher(compile_constraint(Constraint(REGEX, "ab?")))
    assert not vocabulary.masks([matcher])[0, END]
    matcher.advance(ord("a"))
    [mask] = vocabulary.masks([matcher])
    assert np.flatnonzero(mask).tolist() == [ord("b"), END]
    matcher.advance(ord("b"))
    assert matcher.is_complete


def test_tokens_beyond_the_tokenizer_are_never_allowed(vocabulary):
    matcher = vocabulary.matcher(compile_constraint(Constraint(REGEX, "(?s:.*)")))
    [mask] = vocabulary.masks([matcher])
    assert mask.shape == (BYTE_VOCAB_SIZE + 7,)
    assert not mask[BYTE_VOCAB_SIZE:].any()


def test_masks_of_several_answers_are_those_of_each_alone(vocabulary):
    grammars = [compile_constraint(Constraint(REGEX, text)) for text in ("a+", "[x-z]", "q")]
    together = vocabulary.masks([vocabulary.matcher(grammar) for grammar in grammars])
    for grammar, mask in zip(grammars, together, strict=True):
        assert (vocabulary.masks([vocabulary.matcher(grammar)])[0] == mask).all()


def test_json_has_no_room_for_endless_spaces(vocabulary):
    grammar = compile_constraint(Constraint(ConstraintKind.JSON_OBJECT))
    matcher = vocabulary.matcher(grammar)
    matcher.advance(ord("{"))
    assert not vocabulary.masks([matcher])[0, ord(" ")]
