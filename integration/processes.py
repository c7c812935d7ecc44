"""Processes that tools start: starting one with a log, and ending one with all its workers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from integration.environment import REPOSITORY
from integration.progress import say_stopping

LIBRARY = "libattn_backend"
STOP_GRACE_S = 30
TERMINATE_GRACE_S = 5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def own_modules(*first: str) -> dict[str, str]:
    """The environment of a Python process that imports `integration`, and the same attn_backend as this
    process: not the source tree if the package is installed.

    Args:
        first: folders that precede all others.
    """
    package = find_spec("attn_backend")
    folders = (
        [str(Path(package.origin).parents[1])] if package is not None and package.origin is not None else []
    )
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, [*first, *folders, str(REPOSITORY), *inherited])),
        "PYTHONSAFEPATH": "1",
    }


def process_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment with `extra` on top; PYTHONPATH entries are joined, and made absolute since
    processes run elsewhere.
    """
    inherited = [
        str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    ]
    added = [entry for entry in [extra.get("PYTHONPATH", "")] if entry]
    return os.environ | {"PYTHONUNBUFFERED": "1"} | extra | {"PYTHONPATH": os.pathsep.join(added + inherited)}


def start(
    command: list[str], log: Path, environment: dict[str, str], own_session: bool = False
) -> psutil.Popen:
    """Start a process whose output goes to `log`, after the command.

    It runs in the log's folder, so that a source tree in ours does not hide installed packages. In a separate
    session, signals reach it with all its workers, and Ctrl-C does not.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        with _heard_interrupts():
            return psutil.Popen(
                command,
                cwd=log.parent,
                env=process_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=own_session,
            )


@contextlib.contextmanager
def _heard_interrupts() -> Iterator[None]:
    """A process that a shell starts in the background ignores INT, and so would its children: stop_group()
    would wait for them in vain.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN and _takes_signals()
    if is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def group_members(group: int) -> list[psutil.Process]:
    """The running processes of a process group, including orphans."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def library_is_loaded(group: int) -> bool:
    """Whether a process of the group has this package's host library in its memory map.

    The engines' plugins load it when they register or start. But if the plugin is not discovered, vLLM on a
    CPU silently serves with its own backend.
    """
    for process in group_members(group):
        with contextlib.suppress(psutil.Error):
            if any(LIBRARY in region.path for region in process.memory_maps()):
                return True
    return False


def stop_group(leader: psutil.Popen) -> None:
    """Sends INT to the leader, which makes both engines stop; then TERM and KILL to the rest of its process
    group.
    """
    with _deferred_interrupts():
        if leader.poll() is None:
            leader.send_signal(signal.SIGINT)
            with contextlib.suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
                leader.wait(STOP_GRACE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            members = group_members(leader.pid)
            for process in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            psutil.wait_procs(members, TERMINATE_GRACE_S)
        leader.poll()


@contextlib.contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """An impatient Ctrl-C must not leave a server behind: it takes effect once the servers are gone."""
    numbers = STOP_SIGNALS if _takes_signals() else ()
    came: list[int] = []

    def defer(number: int, _: object) -> None:
        say_stopping()
        came.append(number)

    previous = {
        number: handler for number in numbers if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in previous:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _takes_signals() -> bool:
    """Python's handlers run in the main thread, and only this thread may change them."""
    return threading.current_thread() is threading.main_thread()
