"""What the chat format calls the types of JSON values."""

from __future__ import annotations

from collections.abc import Mapping


def type_name(value: object) -> str:
    """Return the type of a JSON value.

    >>> type_name(True), type_name(1.5), type_name("a")
    ('boolean', 'number', 'string')
    """
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case Mapping():
            return "object"
        case _:
            return "array"
