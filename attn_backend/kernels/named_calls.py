"""Functions of the host library whose arguments are given by name: those that csrc/runtime/ exports by
ATTN_EXPORT_BY_NAME.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .library import library


@cache
def names_of(function: str) -> tuple[str, ...]:
    """The arguments of a function, in the library's order."""
    return tuple(str(name) for name in getattr(library(), f"{function}_arguments")())


@cache
def by_name(function: str, last: str | None = None) -> Callable[..., Any]:
    """A function of the library that takes its arguments by their names; those that are not given are None.

    As fast as the call that it makes.

    last: the last argument in the library's order that calls give: one that has fewer arguments takes less
    time.
    """
    names = names_of(function)
    if last is not None:
        names = names[: names.index(last) + 1]
    source = f"lambda *, {', '.join(f'{name}=None' for name in names)}: function({', '.join(names)})"
    made: Callable[..., Any] = eval(source, {"function": getattr(library(), function)})
    made.__name__ = function
    return made
