"""Runs the parts of `make test` or `make check` one after the other, and prints their durations.

Needs only the standard library.

MAKE=make python3.11 -m integration.phases test KERNELS=--distinct
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from integration.progress import INTERRUPTED, say_stopping

# make target and its description
ENVIRONMENT = ("environment", "the environment and this package")
PHASES = {
    "test": [
        ENVIRONMENT,
        ("lint", "ruff, mypy, clang-format, clang-tidy"),
        ("kernels-and-sources", "CUDA kernels compiled by nvcc; sources of the engines' releases"),
        ("unit", "the tests without a running engine"),
        ("fuzz", "random calls"),
        ("integration", "both engines serve on this machine"),
    ],
    "check": [
        ENVIRONMENT,
        ("lint", "ruff, mypy, clang-format, clang-tidy"),
        ("fast", "the fast tests, without an engine"),
    ],
}
DURATIONS = {
    "test": "about 15 to 25 minutes on two idle cores, longer on busy ones. The first time 3 to 10 minutes "
    "more for the environment (1.3 GB of downloads)",
    "check": "about 3 minutes. The first time 2 to 5 minutes more for the environment (0.4 GB of downloads)",
}


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def run(name: str, make: str, variables: list[str]) -> int:
    """Runs the phases until one fails; returns the exit status."""
    print(f"make {name} takes {DURATIONS[name]}. Its parts:", flush=True)
    for target, what in PHASES[name]:
        print(f"    {target:20} {what}", flush=True)
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        if not interrupted:
            say_stopping()
        interrupted = True  # make and its programs also get the terminal's signal: they end by themselves

    signal.signal(signal.SIGINT, interrupt)
    times, status = [], 0
    for target, _ in PHASES[name]:
        begin = time.monotonic()
        print(f"\n==> {target}", flush=True)
        status = subprocess.Popen([make, "--no-print-directory", target, *variables], close_fds=False).wait()
        times.append((target, time.monotonic() - begin))
        if status or interrupted:
            break
    shown = ", ".join(f"{target} {minutes(seconds)}" for target, seconds in times)
    result = "interrupted" if interrupted else f"failed in {times[-1][0]}" if status else "passed"
    print(
        f"\n==> make {name}: {result}. {shown}; together {minutes(sum(seconds for _, seconds in times))}",
        flush=True,
    )
    return INTERRUPTED if interrupted else status


def main() -> None:
    sys.exit(run(sys.argv[1], os.environ.get("MAKE", "make"), sys.argv[2:]))


if __name__ == "__main__":
    main()
