"""The fast tier of the tests (`make check`) and the whole (`make test`): tests that take long are marked `slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], *, fast: int) -> list[Any]:
    """The values of a parameter; all but the first `fast` are marked slow."""
    return [value if index < fast else pytest.param(value, marks=pytest.mark.slow) for index, value in enumerate(values)]
