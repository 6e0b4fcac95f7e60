"""Grammars on a vocabulary: ends, limits, and what only a matcher shows."""

import numpy as np
import pytest

from configs.errors import InvalidRequestError, InvariantError
from model.constraint import Constraint, ConstraintKind, compile_constraint
from model.constraint_vocabulary import ConstraintVocabulary
from model.tokenizer import Tokenizer
from model.tokenizer_files import BYTE_VOCAB_SIZE, END_OF_MESSAGE, special_id, write_tokenizer_files

END = special_id(END_OF_MESSAGE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer_files(folder)
    return Tokenizer.load(folder)


def regex(text):
    return compile_constraint(Constraint(ConstraintKind.REGEX, text))


def vocabulary_of(tokenizer, ends):
    return ConstraintVocabulary(tokenizer, vocab_size=BYTE_VOCAB_SIZE, eos_token_ids=ends)


def test_without_an_end_token_an_answer_is_complete_where_nothing_more_may_come(tokenizer):
    vocabulary = vocabulary_of(tokenizer, [])
    matcher = vocabulary.matcher(regex("ab?"))
    matcher.advance(ord("a"))
    [mask] = vocabulary.masks([matcher])
    assert np.flatnonzero(mask).tolist() == [ord("b")]
    assert not matcher.is_complete
    matcher.advance(ord("b"))
    assert matcher.is_complete


def test_any_end_token_may_end_an_answer(tokenizer):
    vocabulary = vocabulary_of(tokenizer, [END, END + 1])
    matcher = vocabulary.matcher(regex("a*"))
    assert np.flatnonzero(vocabulary.masks([matcher])[0]).tolist() == [ord("a"), END, END + 1]
    matcher.advance(END + 1)


def test_a_token_that_is_not_allowed_is_an_invariant(tokenizer):
    matcher = vocabulary_of(tokenizer, [END]).matcher(regex("ab"))
    with pytest.raises(InvariantError, match="token 122 does not match"):
        matcher.advance(ord("z"))
    assert matcher.error


def test_a_grammar_that_outgrows_the_limits_is_the_requests_fault(tokenizer):
    properties = ", ".join(f'"key{index}": {{"type": "null"}}' for index in range(1000))
    schema = f'{{"type": "object", "properties": {{{properties}}}}}'
    matcher = vocabulary_of(tokenizer, [END]).matcher(
        compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, schema))
    )
    with pytest.raises(InvalidRequestError, match="max is 2000"):
        matcher.advance(ord("{"))


def test_two_answers_of_one_grammar_do_not_touch(tokenizer):
    vocabulary = vocabulary_of(tokenizer, [END])
    first, second = vocabulary.matcher(regex("ab")), vocabulary.matcher(regex("ab"))
    first.advance(ord("a"))
    masks = vocabulary.masks([first, second])
    assert [np.flatnonzero(mask).tolist() for mask in masks] == [[ord("b")], [ord("a")]]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        pytest.param(ConstraintKind.REGEX, "a{1000000000}", id="regex"),
        pytest.param(ConstraintKind.REGEX, "((a{1000}){1000}){1000}", id="nested"),
        pytest.param(
            ConstraintKind.JSON_SCHEMA, '{"type": "string", "pattern": "^a{999999999}$"}', id="json"
        ),
        pytest.param(
            ConstraintKind.GRAMMAR,
            "start: C\nA: /a/{1000}\nB: A{1000}\nC: B{1000}",
            id="terminals",
        ),
        pytest.param(
            ConstraintKind.GRAMMAR,
            '%llguidance {"no_forcing": false}\nstart: /a{1000000000}/',
            id="directive",
        ),
    ],
)
def test_text_without_a_choice_costs_nothing_however_long(tokenizer, kind, text):
    # It took for ever, and all memory, when such text was worked out at once.
    vocabulary = vocabulary_of(tokenizer, [END])
    grammar = compile_constraint(Constraint(kind, text))
    vocabulary.check(grammar)
    assert vocabulary.masks([vocabulary.matcher(grammar)]).sum() == 1


@pytest.mark.parametrize(
    "grammar", ["{", "{}", '{"grammars": []}', '{"grammars": [3]}', '{"grammars": 3}'], ids=repr
)
def test_what_is_no_grammar_of_llguidance_is_refused(tokenizer, grammar):
    with pytest.raises(InvalidRequestError, match="llguidance"):
        vocabulary_of(tokenizer, [END]).matcher(grammar)


def test_text_may_be_spelled_in_any_tokens():
    ranks = {bytes([value]): value for value in range(256)}
    ranks |= {b"he": 256, b"hello": 257}
    tokenizer = Tokenizer(ranks, {})
    vocabulary = ConstraintVocabulary(tokenizer, vocab_size=514, eos_token_ids=[258])
    [mask] = vocabulary.masks([vocabulary.matcher(regex("hello"))])
    assert np.flatnonzero(mask).tolist() == [ord("h"), 256, 257]
