"""Python programs in separate processes, as forks of a process that has imported torch: the import takes
longer than most of the programs.

The process that is forked has not imported attn_backend, so each program loads the library afresh, with its
own environment. This file is also that process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from pathlib import Path


class ForkedPython:
    """A process that is forked for each program. It starts with the first one.

    modules: names that it imports.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._started: tuple[subprocess.Popen[bytes], Connection] | None = None

    def run(
        self, program: str, arguments: Sequence[str], environment: dict[str, str], timeout: float = 300
    ) -> str:
        """Runs the text of a program, like `python -c`, and returns its standard output.

        Modules are found where this process finds them. OpenMP has one thread.

        Raises:
            AssertionError: its exit status is not 0, or it takes longer than `timeout` seconds; with the end
                of its standard error.
        """
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            err.touch()
            connection = self._connect()
            status: int | None = None
            try:
                connection.send((program, [*arguments], environment, [*sys.path], out, err))
                if connection.poll(timeout):
                    status = connection.recv()
            finally:
                # Also when a signal interrupts this: the next program would be given this one's status.
                if status is None:
                    self.end()
            result = f"no exit status after {timeout} s" if status is None else f"exit status {status}"
            assert status == 0, f"{result}\n{err.read_text(errors='replace')[-3000:]}"
            return out.read_text()

    def _connect(self) -> Connection:
        if self._started is None:
            connection, other = Pipe()
            command = [sys.executable, "-P", __file__, str(other.fileno()), *self._modules]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # read when torch is imported
                start_new_session=True,  # for end()
            )
            other.close()
            self._started = process, connection
        return self._started[1]

    def end(self) -> None:
        """Ends the process and its forks. Otherwise it ends with this process."""
        if self._started is None:
            return
        process, connection = self._started
        self._started = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        connection.close()


run = ForkedPython("numpy", "torch").run


def _serve(connection: Connection) -> None:
    while True:
        try:
            program, arguments, environment, path, out, err = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            connection.close()
            _become(program, arguments, environment, path, out, err)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _become(
    program: str, arguments: list[str], environment: dict[str, str], path: list[str], out: Path, err: Path
) -> None:
    status = 1
    try:
        for descriptor, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[:] = ["-c", *arguments], path
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        import_module(module)
    if "attn_backend" in sys.modules or threading.active_count() > 1:
        sys.exit("attn_backend was imported or a thread started, but programs begin without")
    _serve(Connection(int(sys.argv[1])))
