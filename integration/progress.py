"""Runs a program with its output in a log, and derives its progress from the log.

Needs only the standard library, as `integration.environment` does.

python -m integration.progress --who clang-tidy --counted '\\[ *(\\d+)/(\\d+)\\]' --things files --log
.build/clang-tidy.log -- run-clang-tidy.py -quiet
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from attn_backend.jit.progress import status

POLL_S = 0.1
TAIL_BYTES = 4096
STOP_GRACE_S = 10.0
INTERRUPTED = 130  # exit status


def wait_for(
    process: subprocess.Popen[bytes],
    log: Path,
    who: str,
    counted: str,
    things: str,
    at_first: str,
    timeout_s: float = float("inf"),
) -> int:
    """Like follow(): shows how many `things` are done. counted: a regular expression for the log, with groups
    for the number done and the total.
    """
    return follow(process, log, who, count_of(counted, things), at_first, timeout_s)


def count_of(counted: str, things: str) -> Callable[[Path], str | None]:
    """A `state` for follow() that counts completed things."""

    def state(log: Path) -> str | None:
        done = last_count(log, counted)
        return f"{things} {done[0]} of {done[1]}" if done else None

    return state


def follow(
    process: subprocess.Popen[bytes],
    log: Path,
    who: str,
    state: Callable[[Path], str | None],
    at_first: str,
    timeout_s: float = float("inf"),
) -> int:
    """Waits for the end of a process, and meanwhile shows its activity. Returns its exit status.

    Args:
        who: the beginning of each line.
        state: reads the current activity from the log; None: nothing new.
        at_first: shown until `state` returns something.

    Raises:
        TimeoutError: the process has not ended in time. It continues.
    """
    end = time.monotonic() + timeout_s
    with status(who, at_first) as tell:
        while (code := process.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError
            if now := state(log):
                tell(now)
            time.sleep(POLL_S)
    return code


def start_logged(
    command: list[str], log: Path, folder: Path | None = None, variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a program whose output goes to `log`, after the command. End it with stop().

    Args:
        variables: environment variables for the program, unless the user has set them.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        # in a new session: one signal reaches the program and all its children
        return subprocess.Popen(
            command,
            cwd=folder,
            env=(variables or {}) | os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_logged(
    command: list[str],
    log: Path,
    who: str,
    state: Callable[[Path], str | None],
    at_first: str,
    folder: Path | None = None,
    variables: dict[str, str] | None = None,
) -> int:
    """Runs a program as start_logged() does, and shows its activity.

    Returns its exit status. An interrupt also ends it.
    """
    process = start_logged(command, log, folder, variables)
    try:
        return follow(process, log, who, state, at_first)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a session leader and all processes that it has started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)


def last_count(log: Path, counted: str) -> tuple[int, int] | None:
    """The numbers of the last match near the log's end."""
    found = re.findall(counted, end_of(log, TAIL_BYTES))
    return (int(found[-1][0]), int(found[-1][1])) if found else None


def end_of(log: Path, num_bytes: int) -> str:
    with log.open("rb") as file:
        file.seek(max(file.seek(0, 2) - num_bytes, 0))
        return file.read().decode(errors="replace")


def say_stopping() -> None:
    """In a signal handler, where print() could interrupt another print()."""
    with contextlib.suppress(OSError):
        os.write(2, "\nstopping…\n".encode())


def stop_at_once() -> None:
    """From now on Ctrl-C gets an immediate answer, and TERM and HUP end the program like Ctrl-C."""

    def interrupt(number: int, frame: object) -> NoReturn:
        say_stopping()
        raise KeyboardInterrupt

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--who", required=True, help="the beginning of each line")
    parser.add_argument(
        "--counted",
        required=True,
        help="regular expression of a line about progress: the number done, the total",
    )
    parser.add_argument("--things", required=True, help="what is counted")
    parser.add_argument(
        "--log",
        type=Path,
        required=True,
        help="is printed if the program fails, without the lines about progress",
    )
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    stop_at_once()
    begin = time.monotonic()
    try:
        failed = run_logged(
            given.command, given.log, given.who, count_of(given.counted, given.things), "starting"
        )
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    if failed:
        for line in given.log.read_text(errors="replace").splitlines():
            if not re.match(given.counted, line):
                print(line)
    print(f"{given.who}: {'failed' if failed else 'passed'} ({time.monotonic() - begin:.0f} s)", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
