"""The CUDA compiler: where it is, and how it is run.

Every run ends with its output or with an error that says why.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TIME_LIMIT = 600.0  # seconds for one kernel; the slowest take less than a tenth of it on one core
VERSION_TIME_LIMIT = 60.0
ADVICE = "set CUDA_HOME or PATH to a CUDA toolkit (12.4 or newer)"
_running: set[subprocess.Popen[bytes]] = set()


def nvcc() -> str | None:
    """Path of the CUDA compiler, from CUDA_HOME, PATH or the usual place; None when there is none."""
    return next((path for path in _candidates() if os.path.isfile(path) and os.access(path, os.X_OK)), None)


def no_nvcc() -> str:
    """Says that there is no compiler, and what to do."""
    useless = "".join(
        f" ({path} is not an executable file)" for path in _candidates() if os.path.exists(path)
    )
    return f"no nvcc was found{useless}: {ADVICE}, or install a wheel that has the cubins"


@cache
def nvcc_version(compiler: str) -> str:
    """The line of `nvcc --version` that names the build.

    Raises:
        RuntimeError: it says none.
    """
    lines = run([compiler, "--version"], "its version", VERSION_TIME_LIMIT).split("\n")
    version = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if not version:
        raise RuntimeError(f"{compiler} --version says nothing: {ADVICE}")
    return version


def run(command: list[str], what: str, seconds: float, advice: str = ADVICE) -> str:
    """Runs a compiler and returns what it prints.

    `what`: what it is run on, for messages; `advice`: for the message that it cannot be run.

    Raises:
        RuntimeError: it cannot be run, fails, is killed or does not end in time; it and what it started are
            then gone.
    """
    compiler = command[0]
    # not a pipe: a grandchild that holds one open would be waited for
    with scratch_file("output") as path, path.open("w+b") as output:
        try:
            # A group of its own, so that what it starts ends with it. No input: it would wait for some.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"{compiler} cannot be run: {error.strerror}; {advice}") from error
        _running.add(process)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            busy = "if the machine is busy, run `attn-backend compile --jobs 1` later"
            raise RuntimeError(
                f"{compiler} took more than {seconds:g} s for {what} and was ended: {busy}; else {advice}"
            ) from None
        finally:
            _kill(process)
            _running.discard(process)
        text = path.read_bytes().decode(errors="replace")
    if status < 0:
        needs_less = "if memory ran out, `attn-backend compile --jobs 1` needs less"
        raise RuntimeError(
            f"{compiler} was killed by signal {-status} on {what}; {needs_less}\n{text}".rstrip()
        )
    if status:
        raise RuntimeError(
            f"{Path(compiler).name} failed on {what}:\n{text}{compiler} ended with exit status {status}"
        )
    return text


def stop() -> None:
    """Ends the compilers that run, in whatever thread."""
    for process in list(_running):
        _kill(process)


@contextlib.contextmanager
def scratch_file(name: str) -> Iterator[Path]:
    """A file for a compiler to write, in a folder that is gone afterwards.

    Raises:
        RuntimeError: there is no room for it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="attn_backend-") as folder:
            yield Path(folder) / name
    except OSError as error:
        raise RuntimeError(
            f"{error.filename or 'the temporary folder'} cannot be written: {error.strerror}; set TMPDIR to "
            f"a folder that has room"
        ) from error


def _candidates() -> list[str]:
    home = os.environ.get("CUDA_HOME")
    named = [f"{home}/bin/nvcc"] if home else []
    return [*named, *filter(None, [shutil.which("nvcc")]), "/usr/local/cuda/bin/nvcc"]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a compiler, and all that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
