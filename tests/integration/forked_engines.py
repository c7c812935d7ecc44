"""Engine programs as forks of a process that has imported the engine. Each process of a server would need 20
s for the import, and a few seconds for everything else.

Processes that such a program would spawn by multiprocessing are forks too. This file is also the process that
is forked.
"""

from __future__ import annotations

import gc
import multiprocessing.context
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil

POLL_S = 0.05
# The modules that an engine's programs eventually import. Our package is not among them, since each program
# loads its plugin.
MODULES = {
    "vllm": (
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.cli.benchmark.main",
        "vllm.benchmarks.serve",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.core",
        "vllm.v1.worker.cpu_worker",
    ),
    "sglang": (
        "sglang.launch_server",
        "sglang.bench_serving",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.registry",
    ),
}


def engine_of(command: Sequence[str]) -> str | None:
    """The engine whose module this command runs, possibly through another program: PYTHON -m MODULE ..., or
    PYTHON FILE MODULE ...
    """
    package = command[2].partition(".")[0]
    return package if command[0] == sys.executable and package in MODULES else None


class Forks:
    """A process that has imported `modules`; its forks are programs.

    Args:
        log: for its output while it imports.
    """

    def __init__(self, modules: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log, self._lock = log, threading.Lock()
        self._connection, other = Pipe()
        command = [sys.executable, "-P", __file__, str(other.fileno()), *modules]
        with log.open("w") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[other.fileno()], start_new_session=True, **streams
            )
        other.close()

    def start(self, arguments: list[str], log: Path, environment: dict[str, str]) -> Program:
        """Like integration.processes.start, in a separate session. arguments: of the interpreter."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"$ {sys.executable} {' '.join(arguments)}\n")
        return Program(self, self.ask("start", arguments, log, environment))

    def ask(self, *request: Any) -> Any:
        with self._lock:
            try:
                self._connection.send(request)
                return self._connection.recv()
            except (EOFError, OSError):
                raise RuntimeError(
                    f"the process that is forked has ended:\n{self._log.read_text()[-3000:]}"
                ) from None

    def close(self) -> None:
        """The programs go on."""
        self._connection.close()
        self._process.wait()


class Program(psutil.Process):
    """A started program, with the interface of psutil.Popen."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks = forks
        self.returncode: int | None = None
        super().__init__(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        begin = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - begin > timeout:
                raise psutil.TimeoutExpired(timeout, self.pid)
            time.sleep(POLL_S)
        return status


def serve(connection: Connection) -> None:
    """Starts programs until no process can request one.

    Also returns in a program, when the program has ended.
    """
    while True:
        try:
            what, *arguments = connection.recv()
        except EOFError:
            return
        if what == "poll":
            pid, status = os.waitpid(*arguments, os.WNOHANG)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            run(*arguments)
            return
        connection.send(pid)


def run(arguments: list[str], log: Path, environment: dict[str, str]) -> None:
    """The work of an interpreter with these arguments after it has started."""
    os.setsid()
    os.chdir(log.parent)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.path += [
        folder
        for folder in environment.get("PYTHONPATH", "").split(os.pathsep)
        if folder and folder not in sys.path
    ]
    with log.open("ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.context.ForkContext()
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        # the abilities of a model class: vLLM would import itself in another interpreter for this, because of
        # CUDA
        registry._run_in_subprocess = lambda function: function()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    for module in sys.argv[2:]:
        import_module(module)
    if "attn_backend" in sys.modules or threading.active_count() > 1:
        sys.exit("attn_backend was imported or a thread started, but programs begin without")
    # the engines collect garbage when they start, and would scan all imported objects each time
    gc.freeze()
    serve(Connection(int(sys.argv[1])))
