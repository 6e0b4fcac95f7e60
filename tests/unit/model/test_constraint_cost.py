"""Constraints that llguidance would take minutes and gigabytes for are refused at once."""

import json

import pytest

from configs.errors import InvalidRequestError
from model.constraint import Constraint, ConstraintKind, compile_constraint
from model.constraint_cost import MAX_REMAINDERS, check_cost

BIG = 9_999_991


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        pytest.param(ConstraintKind.JSON_SCHEMA, json.dumps({"multipleOf": BIG}), id="schema"),
        pytest.param(
            ConstraintKind.JSON_SCHEMA,
            json.dumps({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}),
            id="common multiple",
        ),
        pytest.param(
            ConstraintKind.JSON_SCHEMA,
            json.dumps({"items": {"anyOf": [{"type": "number", "multipleOf": 1.00003}]}}),
            id="decimals",
        ),
        pytest.param(
            ConstraintKind.GRAMMAR, f'start: %json {{"multipleOf" : {BIG}}}', id="schema in lark"
        ),
        pytest.param(ConstraintKind.JSON_SCHEMA, r'{"multiple\u004ff": 9999991}', id="escaped key"),
    ],
)
def test_multiples_with_too_many_remainders_are_refused(kind, text):
    with pytest.raises(InvalidRequestError, match=f"allowed: {MAX_REMAINDERS}"):
        compile_constraint(Constraint(kind, text))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"multipleOf": 1000000}', id="powers of ten"),
        pytest.param('{"a": {"multipleOf": 0.05}, "b": {"multipleOf": 3600}}', id="several"),
        pytest.param('{"multipleOf": 1e300}', id="exponent"),
        pytest.param('{"multipleOf": 0}', id="zero"),
        pytest.param(f'{{"maximum": {BIG}, "const": "multipleOf"}}', id="another key"),
        pytest.param(f'{{"multiple": {BIG}, "\\q": {BIG}}}', id="bad escape"),
        pytest.param('"' * 60_000, id="quotes"),
        pytest.param("", id="empty"),
    ],
)
def test_what_is_cheap_passes(text):
    check_cost(text)


def test_a_number_of_any_length_is_read():
    with pytest.raises(InvalidRequestError):
        check_cost('{"multipleOf": ' + "7" * 50_000 + "}")
