"""Runs uv and pip with their output in a log; one line on the terminal shows the progress.

uv installs packages many times faster than pip. pip only installs uv, or works for an interpreter that has no
uv. Needs only the standard library, as `integration.environment` does.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from integration.progress import end_of, run_logged

LOG_TAIL_BYTES = 1 << 16
SHOWN_LINES = 12
LONGEST_LINE = 400
PIP_EXCEPTION = "ERROR: Exception:"  # a traceback follows
ERROR = r"\s*(ERROR|fatal|CMake Error|\S*Error:|cause:|hint:|.*\berror:)"
NOT_FOUND = r"No solution found when resolving dependencies"
OFFLINE = r"network was disabled"
# pip's setting: the environment variable that uv reads, and what separates its values
VARIABLES = {
    "index-url": ("UV_INDEX_URL", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
}
PYPI = "https://pypi.org/simple"
TRUE = ("1", "true", "yes", "on")


class InstallError(RuntimeError):
    """uv or pip failed. `not_found`: uv reached the indexes, but none has a version that fits."""

    def __init__(self, command: str, log: Path, output: str) -> None:
        super().__init__(f"`{command}` failed:\n{relevant(output)}\nThe whole output is in {log}")
        self.not_found = re.search(NOT_FOUND, output) is not None and re.search(OFFLINE, output) is None


def relevant(output: str) -> str:
    """The lines of the output that explain the failure: its errors, or otherwise its last lines."""
    lines = [
        line.rstrip()[:LONGEST_LINE]
        for line in output.splitlines()
        if line.strip() and not re.match(r"\s*((?i:warning)|\[notice\])", line)
    ]
    errors = [line for line in lines if re.match(ERROR, line)]
    shown = errors if errors and errors[-1] != PIP_EXCEPTION else lines
    return "\n".join(f"    {line}" for line in shown[-SHOWN_LINES:])


def uv_state(log: Path) -> str | None:
    """uv's current activity, from its log."""
    output = end_of(log, LOG_TAIL_BYTES)
    if match := re.search(r"^Prepared (\d+) package", output, re.MULTILINE):
        return f"copying {match[1]} packages"
    if not (match := re.search(r"^Resolved (\d+) package", output, re.MULTILINE)):
        return None
    pending = dict(re.findall(r"^Downloading (\S+) \((.*)\)$", output, re.MULTILINE))
    for name in re.findall(r"^ Downloaded (\S+)$", output, re.MULTILINE):
        pending.pop(name, None)
    if not pending:
        return f"unpacking {match[1]} packages"
    name, size = next(iter(pending.items()))
    return f"downloading {name} ({size})" + (f" and {len(pending) - 1} more" if len(pending) > 1 else "")


@functools.cache
def pip_settings(python: Path) -> dict[str, str]:
    """The user's settings for `pip install`, from pip's files and environment variables."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    return {
        name: ast.literal_eval(value)
        for section in ("global", "install", ":env:")  # the last one wins
        for name, value in re.findall(rf"^{section}\.([\w-]+)=('.*'|\".*\")$", listed, re.MULTILINE)
    }


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """pip's settings as environment variables for uv. URLs may hold passwords: no command and no log has
    them.
    """
    variables = {
        variable: separator.join(settings[name].split())
        for name, (variable, separator) in VARIABLES.items()
        if settings.get(name)
    }
    if extra := variables.get("UV_EXTRA_INDEX_URL"):
        # Several indexes may have a version. pip then takes the most specific wheel, and uv a wheel of the
        # first index. The main index normally has all wheels, but uv looks there last.
        variables["UV_EXTRA_INDEX_URL"] = f"{settings.get('index-url') or PYPI} {extra}"
    # like pip: the best version of all indexes
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | variables


def run_pip(
    python: Path,
    arguments: list[str],
    log: Path,
    who: str,
    state: Callable[[Path], str | None] = lambda log: None,
    at_first: str = "pip runs",
) -> None:
    """Like run_uv(), with the pip of `python`."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    if run_logged(command, log, who, state, at_first, python.parent):
        raise InstallError(f"pip {shlex.join(arguments)}", log, log.read_text(errors="replace"))


def run_uv(
    python: Path,
    arguments: list[str],
    log: Path,
    who: str,
    state: Callable[[Path], str | None] = uv_state,
    at_first: str = "looking for packages",
) -> None:
    """Runs `uv pip`, which is installed next to `python`, with the user's settings of pip, and shows its
    activity. The user's variables for uv replace those settings.

    Args:
        who: the beginning of the line on the terminal.
        state: reads the current activity from uv's log.

    Raises:
        InstallError: uv failed.
    """
    settings = pip_settings(python)
    subcommand, *rest = arguments
    if subcommand == "install" and settings.get("no-index", "").lower() in TRUE:
        rest.insert(0, "--no-index")
    command = [str(python.parent / "uv"), "pip", subcommand, "--python", str(python), *rest]
    if run_logged(command, log, who, state, at_first, python.parent, uv_variables(settings)):
        raise InstallError(f"uv pip {shlex.join(arguments)}", log, log.read_text(errors="replace"))
