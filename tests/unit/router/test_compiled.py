"""Compiled functions work wherever Latentmesh is installed."""

from __future__ import annotations

import numba
import pytest

from router.compiled import compiled


def test_functions_are_compiled_where_nothing_can_be_kept_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    njit = numba.njit

    def refuse_to_keep(*args: object, **options: object) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", refuse_to_keep)

    @compiled
    def double(number: int) -> int:
        return 2 * number

    assert double(21) == 42
