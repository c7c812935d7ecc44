"""An example's message if a package is missing that only this example needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def needs(*packages: str, source: str = "") -> Iterator[None]:
    """Around imports of these packages: a missing or too old one ends the program with exit status 1.

    source: what pip installs, if that is not the packages' names.
    """
    try:
        yield
    except ImportError as error:
        sys.exit(
            f"error: {error}. This needs {' and '.join(packages)}: "
            f"pip install --upgrade {source or ' '.join(packages)}"
        )


def require(*packages: str) -> None:
    """Before long work whose end needs these packages."""
    with needs(*packages):
        for package in packages:
            import_module(package)
