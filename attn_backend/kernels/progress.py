"""What a user sees of work that takes seconds."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """Shows on stderr that something takes seconds: by a moving line on a terminal, by one plain line elsewhere."""
    if sys.stderr is not None and sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.errors import LiveError

        status = Console(stderr=True).status(f"attn_backend: {text}")
        try:
            status.start()
        except LiveError:  # another line moves already
            yield
            return
        try:
            yield
        finally:
            status.stop()
    else:
        say(text)
        yield


def tracked(items: Sequence[T], text: str) -> Iterable[T]:
    """The items, with a progress bar on a terminal."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        return items
    from rich.progress import track

    return track(items, text, transient=True)


def say(text: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
        sys.stderr.write(f"attn_backend: {text}\n")
        sys.stderr.flush()
