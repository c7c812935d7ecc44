"""Chunks of calls, each in a separate process. A process that dies or hangs is a finding, and the next
process continues after it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from .call import BROKEN, CRASH, FINDINGS, HANG, Call, Outcome, is_fatal, judge

ADDRESS_SPACE = 32 << 30  # for a process without a GPU: a wrong size must not exhaust the machine
START = 120  # seconds that a new process may take to import everything
CallsOf = Callable[[int], Iterator[Call]]  # the calls of one scenario


@dataclass
class Finding:
    kind: str
    title: str
    message: str
    call: int  # the first
    chunk: int  # the first call of its process
    count: int = 1


@dataclass
class Tally:
    """Counts by surface and class, and the findings."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return sum(self.counts.values())

    def add(self, surface: str, title: str, outcome: Outcome, call: int, chunk: int) -> None:
        self.counts[surface, outcome.kind] += 1
        if outcome.kind not in FINDINGS:
            return
        known = self.findings.setdefault(
            (outcome.kind, title), Finding(outcome.kind, title, outcome.message, call, chunk, 0)
        )
        known.count += 1
        if call < known.call:
            known.call, known.chunk, known.message = call, chunk, outcome.message


def run_call(call: Call, on_cuda: bool) -> Outcome:
    """judge(), plus errors that a GPU reports later."""
    outcome = judge(call)
    if on_cuda:
        import torch

        torch.cuda.synchronize()
    return outcome


@dataclass
class Chunk:
    """Scenarios `next` .. `last` - 1 in a process."""

    next: int
    last: int
    pid: int = 0  # 0: there is no process
    process: subprocess.Popen[bytes] | None = None  # a newly started process
    events: BinaryIO | None = None
    errors: BinaryIO | None = None  # the process's standard error
    first: int = 0  # the first call of the process
    call: int | None = None  # the running one
    surface: str = ""
    title: str = ""
    heard: float = 0.0  # when the last event came
    rest: bytes = b""


class Runner:
    """Runs scenarios in processes, `jobs` at a time.

    calls_of: the calls of a scenario; runs in the process of the chunk. calls_of_scenario: their maximum
    number. scenarios: per chunk. command: starts the process of a chunk, which then calls `work` with the
    chunk, the descriptor for its events, and the seconds left.
        None: the process is forked, which is faster, but impossible with a GPU.
    limit: seconds that a call may take.
    """

    def __init__(
        self,
        calls_of: CallsOf,
        calls_of_scenario: int,
        *,
        on_cuda: bool,
        jobs: int,
        scenarios: int,
        limit: float,
        command: Callable[[Chunk, int, float | None], list[str]] | None = None,
    ) -> None:
        self.calls_of, self.calls_of_scenario = calls_of, calls_of_scenario
        self.on_cuda, self.jobs, self.scenarios, self.limit, self.command = (
            on_cuda,
            jobs,
            scenarios,
            limit,
            command,
        )
        self.tally = Tally()

    def run(self, first: int, last: int | None, seconds: float | None) -> Tally:
        """Runs scenarios `first` to `last` - 1; starts none after this many seconds."""
        deadline = time.monotonic() + seconds if seconds is not None else None
        selector = selectors.DefaultSelector()
        running: list[Chunk] = []
        waiting: list[Chunk] = []  # the rest of chunks whose process died
        upcoming = first
        try:
            while True:
                late = deadline is not None and time.monotonic() >= deadline
                while len(running) < self.jobs and not late and (waiting or last is None or upcoming < last):
                    if waiting:
                        chunk = waiting.pop()
                    else:
                        end = (
                            upcoming + self.scenarios
                            if last is None
                            else min(upcoming + self.scenarios, last)
                        )
                        chunk, upcoming = Chunk(upcoming, end), end
                    self._start(chunk, deadline)
                    assert chunk.events is not None
                    selector.register(chunk.events, selectors.EVENT_READ, chunk)
                    running.append(chunk)
                if not running:
                    return self.tally
                for key, _ in selector.select(timeout=0.5):
                    self._read(key.data)
                for chunk in list(running):
                    if chunk.pid and time.monotonic() - chunk.heard > self.limit:
                        self._hung(chunk)
                    if not chunk.pid:
                        running.remove(chunk)
                        selector.unregister(chunk.events)  # type: ignore[arg-type]
                        self._close(chunk)
                        if chunk.next < chunk.last:
                            waiting.append(Chunk(chunk.next, chunk.last))
        finally:
            for chunk in running:
                if chunk.pid:
                    os.kill(chunk.pid, signal.SIGKILL)
                    self._wait(chunk)

    # ---- In the process of a chunk ----

    def _start(self, chunk: Chunk, deadline: float | None) -> None:
        reader, writer = os.pipe()
        chunk.errors = tempfile.TemporaryFile()  # noqa: SIM115
        sys.stdout.flush()
        if self.command is not None:
            left = None if deadline is None else deadline - time.monotonic()
            chunk.process = subprocess.Popen(
                self.command(chunk, writer, left), pass_fds=(writer,), stderr=chunk.errors
            )
            chunk.pid = chunk.process.pid
        else:
            chunk.pid = os.fork()
            if chunk.pid == 0:
                os.close(reader)
                os.dup2(chunk.errors.fileno(), 2)
                self.work(chunk, writer, deadline)
        os.close(writer)
        chunk.events = os.fdopen(reader, "rb", buffering=0)
        chunk.first = chunk.next * self.calls_of_scenario
        chunk.heard = time.monotonic() + (START if chunk.process is not None else 0)

    def work(self, chunk: Chunk, writer: int, deadline: float | None) -> NoReturn:
        """Makes the calls of the chunk and ends the process."""
        status = 1
        try:
            faulthandler.enable(file=2)
            warnings.simplefilter("ignore")
            if not self.on_cuda:
                resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            self._make_calls(chunk, writer, deadline)
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)

    def _make_calls(self, chunk: Chunk, writer: int, deadline: float | None) -> None:
        def tell(*event: Any) -> None:
            os.write(writer, json.dumps(event).encode() + b"\n")

        for scenario in range(chunk.next, chunk.last):
            if deadline is not None and time.monotonic() >= deadline:
                tell("late")
                return
            number = scenario * self.calls_of_scenario
            tell("scenario", scenario, number)
            try:
                for number, call in enumerate(self.calls_of(scenario), number):  # noqa: B020
                    tell("call", number, call.blamed if call.wrong else call.surface, call.title)
                    outcome = run_call(call, self.on_cuda)
                    tell("outcome", outcome.kind, outcome.message[:2000])
            except Exception as error:
                if is_fatal(error):
                    raise
                tell(
                    "broken",
                    number,
                    f"{type(error).__name__}: {error} at {traceback.format_exc().splitlines()[-3].strip()}"[
                        :2000
                    ],
                )

    # ---- In the parent ----

    def _read(self, chunk: Chunk) -> None:
        assert chunk.events is not None
        data = os.read(chunk.events.fileno(), 1 << 16)
        chunk.heard = time.monotonic()
        if not data:
            status = self._wait(chunk)
            if status != 0:
                end = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                self._died(chunk, CRASH, end + self._stack(chunk))
            else:
                chunk.next = chunk.last
            return
        *lines, chunk.rest = (chunk.rest + data).split(b"\n")
        for line in lines:
            self._hear(chunk, *json.loads(line))

    def _hear(self, chunk: Chunk, event: str, *what: Any) -> None:
        if event == "scenario":
            chunk.next, chunk.call = what
            chunk.surface = chunk.title = "making the calls"
        elif event == "call":
            chunk.call, chunk.surface, chunk.title = what
        elif event == "outcome":
            assert chunk.call is not None
            self.tally.add(chunk.surface, chunk.title, Outcome(*what), chunk.call, chunk.first)
            chunk.surface = chunk.title = "making the next call"
        elif event == "broken":
            number, message = what
            self.tally.add(
                "(fuzz)", f"making the calls: {message}", Outcome(BROKEN, message), number, chunk.first
            )

    def _hung(self, chunk: Chunk) -> None:
        os.kill(chunk.pid, signal.SIGABRT)  # faulthandler prints where it was
        time.sleep(0.5)
        os.kill(chunk.pid, signal.SIGKILL)
        self._wait(chunk)
        self._died(chunk, HANG, f"more than {self.limit:.0f} s{self._stack(chunk)}")

    def _died(self, chunk: Chunk, kind: str, message: str) -> None:
        call = chunk.call if chunk.call is not None else chunk.first
        self.tally.add(
            chunk.surface or "(fuzz)",
            chunk.title or "beginning the process",
            Outcome(kind, message),
            call,
            chunk.first,
        )
        chunk.next += 1  # the rest of this scenario is skipped

    def _wait(self, chunk: Chunk) -> int:
        """The exit status of the process, or the negative number of its signal."""
        status = (
            os.waitstatus_to_exitcode(os.waitpid(chunk.pid, 0)[1])
            if chunk.process is None
            else chunk.process.wait()
        )
        chunk.pid = 0
        return status

    def _stack(self, chunk: Chunk) -> str:
        """The innermost frames of the output of a process that died."""
        assert chunk.errors is not None
        chunk.errors.seek(0)
        lines = chunk.errors.read().decode(errors="replace").splitlines()
        frames = [line.strip() for line in lines if line.strip().startswith("File ")]
        ends = (
            frames[:3]
            if any("most recent call first" in line for line in lines)
            else [line.strip() for line in lines[-3:]]
        )
        return "".join(f"\n        {line}" for line in ends)

    def _close(self, chunk: Chunk) -> None:
        for file in (chunk.events, chunk.errors):
            if file is not None:
                file.close()
