"""Messages to the user: progress of work that takes seconds or longer, and warnings."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TextIO, TypeVar

T = TypeVar("T")

LOGGER = logging.getLogger("attn_backend")
warned: set[str] = set()  # this process has logged these
FIRST_LINE_S, LINE_EVERY_S = 2.0, 10.0  # if there is no live line


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """Shows on stderr that something takes seconds: a live line on a terminal, one plain line elsewhere."""
    if sys.stderr is not None and sys.stderr.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.errors import LiveError

        status = Console(stderr=True).status(f"attn_backend: {text}")
        try:
            status.start()
        except LiveError:  # another live line is active
            yield
            return
        try:
            yield
        finally:
            status.stop()
    else:
        say(text)
        yield


def _replace_line(stream: TextIO, text: str) -> None:
    stream.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
    stream.flush()


@contextlib.contextmanager
def status(who: str, what: str, stream: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """Shows what is running, and for how long. On a terminal it is a live line; elsewhere, and in other
    threads, a plain line after 2 s and then every 10 s.

    Yields a function that sets the text, such as "requests 3 of 32"; `who` is its prefix.

    Args:
        stream: default: the stdout of this moment, even if the body redirects stdout.
    """
    stream = stream or sys.stdout
    begin, ended = time.monotonic(), threading.Event()

    def line() -> str:
        return f"{who}: {what} ({time.monotonic() - begin:.0f} s)"

    def tell(now: str) -> None:
        nonlocal what
        what = now

    def repeat(show: Callable[[], None], first_s: float, every_s: float) -> None:
        wait_s = min(first_s, every_s)
        while not ended.wait(wait_s):
            show()
            wait_s = every_s

    with contextlib.ExitStack() as stack:
        show, every_s = (lambda: print(line(), file=stream, flush=True)), LINE_EVERY_S
        if stream.isatty() and threading.current_thread() is threading.main_thread():
            every_s = 1.0
            if find_spec("rich") is not None:
                from rich.console import Console
                from rich.text import Text

                # slow refresh: a measurement may share the processor
                moving = stack.enter_context(Console(file=stream).status(Text(line()), refresh_per_second=4))
                show = lambda: moving.update(Text(line()))  # noqa: E731
            else:
                show = lambda: _replace_line(stream, line())  # noqa: E731
                stack.callback(_replace_line, stream, "")
                show()
        thread = threading.Thread(target=repeat, args=(show, FIRST_LINE_S, every_s), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ended.set)
        yield tell


def tracked(items: Sequence[T], text: str) -> Iterable[T]:
    """Iterates over the items, with a progress bar on a terminal and status()'s lines on stderr elsewhere."""
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.progress import track

        return track(items, text, transient=True)
    return _counted(items, text)


def _counted(items: Sequence[T], text: str) -> Iterator[T]:
    with status("attn_backend", f"{text} 1 of {len(items)}", sys.stderr) as tell:
        for number, item in enumerate(items, 1):
            tell(f"{text} {number} of {len(items)}")
            yield item


def say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        sys.stderr.write(f"attn_backend: {text}\n")
        sys.stderr.flush()


def warn_once(message: str, logger: logging.Logger = LOGGER, *, subject: str | None = None) -> None:
    """Logs a warning once per process.

    Args:
        subject: only the first warning with this subject is logged.
    """
    if (subject or message) not in warned:
        warned.add(subject or message)
        logger.warning(message)
