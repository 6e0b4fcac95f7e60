"""One object of a checkpoint's `config.json`, read strictly: every failure names its full key.

Knows nothing about models; `model/dims_reading.py` and `model/storage.py` say which keys matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from configs.errors import ModelConfigError

_MISSING = object()
MAX_INTEGER = (1 << 31) - 1
"""No count of a model is larger; sums over absurd ones would take all memory."""


@dataclass(frozen=True, slots=True)
class ConfigSection:
    """A JSON object and where it stands in the file. Every method raises `ModelConfigError`."""

    values: Mapping[str, object]
    path: str = ""
    """Dotted path of the object, empty for the outermost one."""

    def name(self, key: str) -> str:
        """Full dotted name of a key."""
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def value(self, key: str) -> object:
        """Return a value that must be there; it may be null."""
        found = self.values.get(key, _MISSING)
        if found is _MISSING:
            raise ModelConfigError(
                f"config.json lacks {self.name(key)}, which changes what the model computes; "
                "restore the key from the released config"
            )
        return found

    def section(self, key: str) -> ConfigSection:
        """Return a nested object."""
        found = self.value(key)
        if not isinstance(found, Mapping):
            raise self.unusable(key, found, "an object")
        return ConfigSection(found, self.name(key))

    def integer(self, key: str, *, at_least: int = 1, at_most: int = MAX_INTEGER) -> int:
        """Return an integer in `at_least..at_most`."""
        found = self.value(key)
        is_integer = isinstance(found, int) and not isinstance(found, bool)
        if not is_integer or not at_least <= found <= at_most:  # type: ignore[operator]  # narrowed by is_integer
            limit = "" if at_most == MAX_INTEGER else f" and <= {at_most}"
            raise self.unusable(key, found, f"an integer >= {at_least}{limit}")
        return cast("int", found)

    def number(self, key: str) -> float:
        """Return a finite number."""
        found = self.value(key)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        if not is_number or not abs(float(found)) < float("inf"):  # type: ignore[arg-type]  # narrowed by is_number
            raise self.unusable(key, found, "a finite number")
        return float(found)  # type: ignore[arg-type]  # narrowed by is_number

    def positive(self, key: str) -> float:
        """Return a number above zero."""
        found = self.number(key)
        if found <= 0:
            raise self.unusable(key, found, "a number > 0")
        return found

    def flag(self, key: str) -> bool:
        """Return true or false."""
        found = self.value(key)
        if not isinstance(found, bool):
            raise self.unusable(key, found, "true or false")
        return found

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers."""
        found = self.value(key)
        is_list = isinstance(found, list | tuple)
        if not is_list or any(not isinstance(i, int) or isinstance(i, bool) for i in found):  # type: ignore[attr-defined]  # narrowed by is_list
            raise self.unusable(key, found, "a list of integers")
        return tuple(found)  # type: ignore[arg-type]  # narrowed by is_list

    def require(self, key: str, expected: object) -> None:
        """Refuse every value but the one this implementation computes."""
        found = self.value(key)
        if found != expected or isinstance(found, bool) != isinstance(expected, bool):
            raise self.unusable(key, found, f"{expected!r}, the only one that is implemented")

    def require_if_present(self, key: str, expected: object) -> None:
        """Like `require`, for a key whose absence means the expected value."""
        if self.has(key):
            self.require(key, expected)

    def unusable(self, key: str, found: object, expected: str) -> ModelConfigError:
        """The error for a value of the wrong kind or range."""
        return ModelConfigError(f"config.json: {self.name(key)} is {found!r}; expected {expected}")
