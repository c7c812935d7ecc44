"""The fast tier of the tests (`make check`) and all tests (`make test`): slow tests are marked `slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch


def mostly_slow(values: Iterable[Any], *, fast: int, without_gpu: int | None = None) -> list[Any]:
    """The values of a parameter; all but the first `fast` are marked slow. without_gpu: their number without
    a GPU. GPU kernels need more random cases than the CPU's.
    """
    values = list(values)[: None if torch.cuda.is_available() else without_gpu]
    return [
        value if index < fast else pytest.param(value, marks=pytest.mark.slow)
        for index, value in enumerate(values)
    ]
