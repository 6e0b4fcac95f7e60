"""Functions that are compiled when they are first called. The one place that knows numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Return `function`, to be compiled at its first call and kept on disk where possible.

    It may use numpy arrays, numbers, named tuples of them, and other compiled functions. It runs
    without bounds checks: callers check what they pass. The first call on a machine takes seconds,
    the first of a process a fraction of one.
    """
    try:
        return cast("Function", numba.njit(cache=True)(function))
    except RuntimeError:
        # Nowhere to keep it: neither beside the source nor in the user's cache folder.
        return cast("Function", numba.njit(function))
