"""The fast tier of the tests (`make check`) and all tests (`make test`): slow tests are marked `slow`.

Both are smaller on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def distinct(values: Iterable[Any], *, repeated: Container[int]) -> list[Any]:
    """The values of a parameter; without a GPU, those at the places `repeated` are left out.

    Each of these differs from the others only in what other cases vary, too.
    """
    return [value for place, value in enumerate(values) if HAS_GPU or place not in repeated]


def in_turn(values: Iterable[Any], turn: int, *, without_gpu: int) -> list[tuple[int, Any]]:
    """enumerate(values); without a GPU, only `without_gpu` of them, which begin where the turn before ended.

    A test that a parameter repeats passes the parameter's number, so that its cases take turns.
    """
    numbered = list(enumerate(values))
    if HAS_GPU:
        return numbered
    places = {(turn * without_gpu + i) % len(numbered) for i in range(without_gpu)}
    return [numbered[place] for place in sorted(places)]


def mostly_slow(values: Iterable[Any], *, fast: int, without_gpu: int | None = None) -> list[Any]:
    """The values of a parameter; all but the first `fast` are marked slow. without_gpu: their number without
    a GPU. GPU kernels need more random cases than the CPU's.
    """
    values = list(values)[: None if HAS_GPU else without_gpu]
    return [
        value if index < fast else pytest.param(value, marks=pytest.mark.slow)
        for index, value in enumerate(values)
    ]
