"""Starts an engine's server, waits until it answers, and stops it in every case: normal end, failure, Ctrl-C,
a TERM or HUP signal.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from attn_backend.jit.progress import status
from integration.engines import Engine, Launch
from integration.engines.base import is_ours
from integration.http import CONNECTIONS, is_ready
from integration.processes import STOP_SIGNALS, library_is_loaded, start, stop_group
from integration.progress import say_stopping

POLL_S = 0.5
TAIL_LINES = 40
LONGEST_LINE = 1000  # SGLang prints all its arguments in one line of 20 kB


class ServerError(RuntimeError):
    """The server did not start or died; the end of its log was printed."""


class ServerTimeout(ServerError):
    """The server was not ready in time."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def print_tail(log: Path) -> None:
    lines = log.read_text(errors="replace").splitlines()
    print(f"--- last lines of {log}", file=sys.stderr)
    for line in lines[-TAIL_LINES:]:
        print(f"    {line[:LONGEST_LINE]}", file=sys.stderr)
    print("---", file=sys.stderr, flush=True)


def stop_on_signals() -> None:
    """Ctrl-C, TERM and HUP cancel all requests and end the program, which stops servers on the way out."""

    def leave(number: int, _: object) -> None:
        say_stopping()
        CONNECTIONS.cancel()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in STOP_SIGNALS:
        # as INT is in a program that a shell starts in the background
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


class Server:
    """A started server. `url`: its address, once wait_until_ready() has returned."""

    def __init__(self, engine: Engine, launch: Launch, log: Path) -> None:
        self.engine, self.launch, self.log = engine, launch, log
        self.label = f"{engine.name} with {launch.name}"
        self.url = f"http://127.0.0.1:{launch.port}"
        self.begin = time.monotonic()
        print(f"{self.label}: the server starts, log {log}", flush=True)
        # the engines leave files in theirs
        self._scratch = tempfile.TemporaryDirectory(prefix="attn_backend-", ignore_cleanup_errors=True)
        environment = engine.server_environment(launch) | launch.environment | {"TMPDIR": self._scratch.name}
        self.process = start(engine.server_command(launch), log, environment, own_session=True)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises ServerError if it does not come up within `timeout_s` of its start, or runs without this
        package although it should use it.
        """
        _wait_until_ready(self.process, self.url, self.label, self.log, self.begin, timeout_s)
        if is_ours(self.launch.backend) and not library_is_loaded(self.process.pid):
            python = self.launch.python
            raise ServerError(
                f"{self.label}: the server runs, but without attn_backend: `attn-backend doctor` of {python} "
                f"says why, log {self.log}"
            )
        print(f"{self.label}: server ready after {time.monotonic() - self.begin:.0f} s", flush=True)

    def raise_if_dead(self) -> None:
        if self.process.poll() is not None:
            raise ServerError(
                f"{self.label}: the server died with exit status {self.process.returncode}, log {self.log}"
            )

    def ask_to_stop(self) -> None:
        """Does not wait, so several servers can stop at the same time."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        try:
            with status(self.label, "stopping"):
                stop_group(self.process)
        finally:
            self._scratch.cleanup()


@contextlib.contextmanager
def running_server(engine: Engine, launch: Launch, log: Path, timeout_s: float) -> Iterator[str]:
    """A context in which the server answers; yields its base URL.

    Raises ServerError if it does not come up in `timeout_s`.
    """
    with ready_server(engine, launch, log, timeout_s) as server:
        yield server.url


@contextlib.contextmanager
def ready_server(
    engine: Engine,
    launch: Launch,
    log: Path,
    timeout_s: float,
    meanwhile: Callable[[], object] = lambda: None,
) -> Iterator[Server]:
    """Like running_server, but yields the server itself. `meanwhile` is called while the server starts."""
    server = Server(engine, launch, log)
    try:
        meanwhile()
        try:
            server.wait_until_ready(timeout_s)
            yield server
            server.raise_if_dead()
        except Exception:
            print_tail(log)
            raise
    finally:
        server.stop()


def _wait_until_ready(
    process: psutil.Popen, url: str, label: str, log: Path, begin: float, timeout_s: float
) -> None:
    with status(label, "starting"):
        while not is_ready(f"{url}/health"):
            if process.poll() is not None:
                raise ServerError(
                    f"{label}: the server ended with exit status {process.returncode} before it was ready, "
                    f"log {log}"
                )
            if time.monotonic() - begin > timeout_s:
                raise ServerTimeout(f"{label}: the server was not ready after {timeout_s:.0f} s, log {log}")
            time.sleep(POLL_S)
