"""Runs pip with its output in a log; one line on the terminal shows the progress.

Needs only the standard library, as `integration.environment` does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from integration.progress import end_of, run_logged

LOG_TAIL_BYTES = 1 << 16  # `Installing collected packages: ...` is a long line
SHOWN_LINES = 12
LONGEST_LINE = 400
PIP_EXCEPTION = "ERROR: Exception:"  # a traceback follows
NOT_FOUND = r"No matching distribution found|Could not find a version|ResolutionImpossible"
UNREACHABLE = r"connection broken by|Temporary failure in name resolution|Name or service not known"


class PipError(RuntimeError):
    """pip failed. `not_found`: an index answered, but has no version that fits."""

    def __init__(self, command: str, log: Path, output: str) -> None:
        super().__init__(f"`{command}` failed:\n{relevant(output)}\nThe whole output is in {log}")
        self.not_found = re.search(NOT_FOUND, output) is not None and re.search(UNREACHABLE, output) is None


def relevant(output: str) -> str:
    """The lines of pip's output that explain its failure: its errors, or otherwise its last lines."""
    lines = [
        line.rstrip()[:LONGEST_LINE]
        for line in output.splitlines()
        if line.strip() and not re.match(r"\s*(WARNING|\[notice\])", line)
    ]
    errors = [line for line in lines if re.match(r"\s*(ERROR|fatal|CMake Error|\S*Error:|.*\berror:)", line)]
    shown = errors if errors and errors[-1] != PIP_EXCEPTION else lines
    return "\n".join(f"    {line}" for line in shown[-SHOWN_LINES:])


def pip_state(log: Path) -> str | None:
    """pip's current activity, from the end of its log."""
    for line in reversed(end_of(log, LOG_TAIL_BYTES).splitlines()):
        if match := re.match(r"\s*Downloading (\S+/)?(\S+).* (\([\d.]+ .?B\))", line):
            return f"downloading {match[2]} {match[3]}"
        if match := re.match(r"\s*(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line):
            return f"looking for {match[1]}"
        if match := re.match(r"Installing collected packages: (.*)", line):
            return f"copying {len(match[1].split(','))} packages"
    return None


def run_pip(
    python: Path,
    arguments: list[str],
    log: Path,
    who: str,
    state: Callable[[Path], str | None] = pip_state,
    at_first: str = "pip starts",
) -> None:
    """Runs pip and shows its activity.

    Args:
        who: the beginning of the line on the terminal.
        state: reads the current activity from pip's log.

    Raises:
        PipError: pip failed.
    """
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    failed = run_logged(command, log, who, state, at_first, python.parent)
    if failed:
        raise PipError(f"pip {shlex.join(arguments)}", log, log.read_text(errors="replace"))
