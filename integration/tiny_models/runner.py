"""Code shared by the programs that answer: their command line, and a process for each family, which has a log
and starts with everything imported.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from integration.command_line import one_of
from integration.tiny_models.families import FAMILIES, Family
from integration.tiny_models.questions import Answer, write_answers

TAIL_LINES = 40  # printed from a log after a failure
LONGEST_LINE = 1000  # SGLang prints all its arguments in one line of 20 kB


def answers_file(folder: Path, name: str, who: str) -> Path:
    """The file with the answers of an engine's backend, or of the reference."""
    return folder / name / f"{who}.answers.json"


def failure_file(folder: Path, name: str, who: str) -> Path:
    """The file with the one-line error of a family that failed."""
    return answers_file(folder, name, who).with_suffix(".error")


def log_file(folder: Path, name: str, who: str) -> Path:
    """The file with the output of a family's process and its engine."""
    return folder / name / f"{who}.log"


class Progress:
    """Writes lines about a family to the original standard output. The output of the process and its children
    goes to its log.
    """

    def __init__(self, label: str, log: Path) -> None:
        self._label, self._begin, self._output = label, time.monotonic(), os.dup(1)
        with log.open("wb") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed process has flushed its output
        self.say(f"starts, log {log}")

    def say(self, text: str) -> None:
        # in one call, so that no line of another process comes between
        os.write(self._output, f"{self._label}: {text}\n".encode())

    def say_when(self, what: str, more: str = "") -> None:
        self.say(f"{what} after {time.monotonic() - self._begin:.0f} s{more}")


_of_this_process: list[Progress] = []


def say_ready() -> None:
    """Reports that the engine of this family's process is ready."""
    for progress in _of_this_process:
        progress.say_when("ready")


def run_families(
    description: str | None, who: str, names: list[str], answer_all: Callable[[Family, Path], list[Answer]]
) -> None:
    """Writes the answers of each family that the command line names.

    Exits with 1 if one has failed; the others are still answered.

    TINY_MODELS_ANSWERS: a folder for the answers and logs; default: next to the models.

    Engines support only one start per process, so each family gets a fork of this process, which has imported
    the engine and has started no thread.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the models are")
    parser.add_argument("families", nargs="*", type=one_of(FAMILIES), help=f"default: {' '.join(names)}")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    arguments, _ = parser.parse_known_args()
    answers = Path(os.environ.get("TINY_MODELS_ANSWERS", arguments.folder))
    failed: list[str] = []
    running: dict[int, str] = {}

    def wait_for_one() -> None:
        child, status = os.wait()
        name = running.pop(child, None)
        if name is not None and os.waitstatus_to_exitcode(status) != 0:
            failed.append(name)
            failure = failure_file(answers, name, who)
            if not failure.exists():  # a signal has ended it
                failure.parent.mkdir(parents=True, exist_ok=True)
                failure.write_text(f"ended with status {os.waitstatus_to_exitcode(status)}")

    # the engines collect garbage when they start, and would scan all imported objects each time
    gc.freeze()
    for name in arguments.families or names:
        child = os.fork()
        if child == 0:
            _answer_and_leave(FAMILIES[name], arguments.folder, answers, who, answer_all)
        running[child] = name
        if len(running) == arguments.jobs:
            wait_for_one()
    while running:
        wait_for_one()
    for name in failed:
        log = log_file(answers, name, who)
        lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if log.exists() else []
        print(
            f"--- the end of {log}",
            *(line[:LONGEST_LINE] for line in lines),
            "---",
            sep="\n",
            file=sys.stderr,
        )
        print(f"{name}: {failure_file(answers, name, who).read_text()}", file=sys.stderr, flush=True)
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    _leave(int(bool(failed)))


def _leave(status: int) -> NoReturn:
    """Exits at once: otherwise the engines' libraries would print unreleased objects after the useful
    output.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _answer_and_leave(
    family: Family, folder: Path, answers: Path, who: str, answer_all: Callable[[Family, Path], list[Answer]]
) -> None:
    status = 1
    written, failure = answers_file(answers, family.name, who), failure_file(answers, family.name, who)
    partial = written.with_suffix(".partial")
    try:
        written.parent.mkdir(parents=True, exist_ok=True)
        for earlier in (written, failure):
            earlier.unlink(missing_ok=True)
        progress = Progress(f"{who}, {family.name}", log_file(answers, family.name, who))
        _of_this_process.append(progress)
        try:
            write_answers(partial, answer_all(family, folder / family.name))
            partial.rename(written)  # readers that wait for the file find it complete
        except BaseException as error:
            traceback.print_exc(limit=-12)
            failure.write_text(f"{type(error).__name__}: {error}")
            progress.say_when(
                "failed", f": {type(error).__name__}: {error}"[:LONGEST_LINE].partition("\n")[0]
            )
        else:
            progress.say_when("answered")
            status = 0
    finally:
        _leave(status)
