"""Programs in forks of a process that has imported modules: without an end, or interrupted."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import forked_python
import pytest

LOCKS = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
{then}
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a process that has imported nothing."""
    start = cache(forked_python._forked_process.__wrapped__)
    monkeypatch.setattr(forked_python, "MODULES", ())
    monkeypatch.setattr(forked_python, "_forked_process", start)
    yield
    forked_python._end(*start())


def run(program: str, *arguments: str, timeout: float = 60) -> str:
    return forked_python.run(program, arguments, dict(os.environ), timeout)


def assert_ended(path: Path) -> None:
    """The program that locks `path` has ended, and later ones run."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert run("print(1)") == "1\n"
    with pytest.raises(AssertionError, match=r"(?s)exit status 1\n.*ValueError: 2"):
        run("raise ValueError(2)")


def test_a_program_that_does_not_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no exit status after 1 s"):
        run(LOCKS.format(then=""), str(tmp_path / "lock"), timeout=1)
    assert_ended(tmp_path / "lock")


def test_an_interrupt(tmp_path: Path) -> None:
    """The next program must not receive its status."""
    then = f"import os; os.kill({os.getpid()}, {int(signal.SIGINT)})"
    with pytest.raises(KeyboardInterrupt):
        run(LOCKS.format(then=then), str(tmp_path / "lock"))
    assert_ended(tmp_path / "lock")
