"""Starts an engine's server, waits until it answers, and stops it in every case: normal end, failure, Ctrl-C, a TERM or HUP signal."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from integration.engines import Engine, Launch
from integration.engines.base import is_ours
from integration.http import is_ready
from integration.plugin import library_is_loaded

POLL_S = 0.5
PROGRESS_EVERY_S = 15
STOP_GRACE_S = 30
TAIL_LINES = 40
LONGEST_LINE = 1000  # SGLang prints all its arguments in one line of 20 kB


class ServerError(RuntimeError):
    """The server did not start or died; the end of its log has been printed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def process_environment(extra: dict[str, str]) -> dict[str, str]:
    """This process's environment with `extra` on top; PYTHONPATH entries are joined, and made absolute since servers run elsewhere."""
    inherited = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    added = [entry for entry in [extra.get("PYTHONPATH", "")] if entry]
    return os.environ | {"PYTHONUNBUFFERED": "1"} | extra | {"PYTHONPATH": os.pathsep.join(added + inherited)}


def print_tail(log: Path) -> None:
    lines = log.read_text(errors="replace").splitlines()
    print(f"--- last lines of {log}", file=sys.stderr)
    for line in lines[-TAIL_LINES:]:
        print(f"    {line[:LONGEST_LINE]}", file=sys.stderr)
    print("---", file=sys.stderr, flush=True)


def stop_on_signals() -> None:
    """Let TERM and HUP end the program the way Ctrl-C does, so that servers are stopped on the way out."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)


class Server:
    """A server that has been started. `url`: where it answers, once wait_until_ready() has returned."""

    def __init__(self, engine: Engine, launch: Launch, log: Path) -> None:
        self.engine, self.launch, self.log = engine, launch, log
        self.label = f"{engine.name} with {launch.backend}"
        self.url = f"http://127.0.0.1:{launch.port}"
        self.begin = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = tempfile.TemporaryDirectory(prefix="attn_backend-", ignore_cleanup_errors=True)  # the engines leave files in theirs
        with log.open("w") as output:
            output.write(f"$ {' '.join(engine.server_command(launch))}\n")
            output.flush()
            # its own session: it can be signalled with all its workers, and Ctrl-C reaches it through us alone. Its working directory is
            # the log's, so that a source tree in ours does not hide installed packages
            self.process = subprocess.Popen(
                engine.server_command(launch),
                cwd=log.parent,
                env=process_environment(engine.server_environment(launch) | {"TMPDIR": self._scratch.name}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises ServerError when it does not come up within `timeout_s` of its start, or without this package where it should use it."""
        _wait_until_ready(self.process, self.url, self.label, self.log, self.begin, timeout_s)
        if is_ours(self.launch.backend) and not library_is_loaded(self.process.pid):
            python = self.launch.python
            raise ServerError(f"{self.label}: the server runs, but without attn_backend: `attn-backend doctor` of {python} says why, log {self.log}")
        print(f"{self.label}: server ready after {time.monotonic() - self.begin:.0f} s", flush=True)

    def raise_if_dead(self) -> None:
        if self.process.poll() is not None:
            raise ServerError(f"{self.label}: the server died with exit status {self.process.returncode}, log {self.log}")

    def ask_to_stop(self) -> None:
        """Does not wait: of several servers that are to stop, none waits for another."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        _stop(self.process)
        self._scratch.cleanup()


@contextlib.contextmanager
def running_server(engine: Engine, launch: Launch, log: Path, timeout_s: float) -> Iterator[str]:
    """A context in which the server answers; gives its base URL. Raises ServerError when it does not come up in `timeout_s`."""
    server = Server(engine, launch, log)
    try:
        server.wait_until_ready(timeout_s)
        yield server.url
        server.raise_if_dead()
    except Exception:
        print_tail(log)
        raise
    finally:
        server.stop()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, label: str, log: Path, begin: float, timeout_s: float) -> None:
    next_progress = PROGRESS_EVERY_S
    while not is_ready(f"{url}/health"):
        waited = time.monotonic() - begin
        if process.poll() is not None:
            raise ServerError(f"{label}: the server ended with exit status {process.returncode} before it was ready, log {log}")
        if waited > timeout_s:
            raise ServerError(f"{label}: the server was not ready after {timeout_s:.0f} s, log {log}")
        if waited > next_progress:
            print(f"{label}: starting ({waited:.0f} s)", flush=True)
            next_progress += PROGRESS_EVERY_S
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """INT, which both engines take as the wish to stop; then TERM and KILL to whatever of its process group is left."""
    with _deferred_interrupts():
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_GRACE_S)
        for number, grace_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            if not _group_lives(process.pid):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            deadline = time.monotonic() + grace_s
            while _group_lives(process.pid) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.1)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """A second, impatient Ctrl-C must not leave a server behind: it has to wait until the servers are gone."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
