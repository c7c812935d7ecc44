"""Programs in forks of a process that has imported modules: without an end, or interrupted."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_python import ForkedPython

LOCKS = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
{then}
time.sleep(60)
"""


@pytest.fixture
def forked() -> Iterator[ForkedPython]:
    forked = ForkedPython()
    yield forked
    forked.end()


def run(forked: ForkedPython, program: str, *arguments: str, timeout: float = 60) -> str:
    return forked.run(program, arguments, dict(os.environ), timeout)


def assert_ended(forked: ForkedPython, path: Path) -> None:
    """The program that locks `path` has ended, and later ones run."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert run(forked, "print(1)") == "1\n"
    with pytest.raises(AssertionError, match=r"(?s)exit status 1\n.*ValueError: 2"):
        run(forked, "raise ValueError(2)")


def test_a_program_that_does_not_end(forked: ForkedPython, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no exit status after 1 s"):
        run(forked, LOCKS.format(then=""), str(tmp_path / "lock"), timeout=1)
    assert_ended(forked, tmp_path / "lock")


def test_an_interrupt(forked: ForkedPython, tmp_path: Path) -> None:
    """The next program must not receive its status."""
    then = f"import os; os.kill({os.getpid()}, {int(signal.SIGINT)})"
    with pytest.raises(KeyboardInterrupt):
        run(forked, LOCKS.format(then=then), str(tmp_path / "lock"))
    assert_ended(forked, tmp_path / "lock")
