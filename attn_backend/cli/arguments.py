"""Arguments for a server in one argument of the command line."""

from __future__ import annotations

import shlex


def split_arguments(text: str) -> list[str]:
    """As a shell does outside of quotes: a line that ends with a backslash, which quotes keep, goes on with
    the next one.
    """
    return shlex.split(text.replace("\\\n", ""))
