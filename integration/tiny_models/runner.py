"""What the three programs have in common: their command line, and a process for each family that begins with everything imported."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from integration.tiny_models.families import FAMILIES, Family
from integration.tiny_models.questions import Answer, write_answers


def answers_file(folder: Path, name: str, who: str) -> Path:
    """Where the answers of an engine's backend, or of the reference, are kept."""
    return folder / name / f"{who}.answers.json"


def run_families(description: str | None, who: str, names: list[str], answer_all: Callable[[Family, Path], list[Answer]]) -> None:
    """Writes the answers of each family that the command line names. Exits with 1 if one has failed; the others are answered all the same.

    ATTN_BACKEND_ANSWERS: a folder for the answers; default: beside the models.

    Engines are made to be started once a process: each family gets a fork of this one, which has imported the engine and has started no thread.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models are")
    parser.add_argument("families", nargs="*", help=f"default: {' '.join(names)}")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    arguments, _ = parser.parse_known_args()
    answers = Path(os.environ.get("ATTN_BACKEND_ANSWERS", arguments.folder))
    failed: list[str] = []
    running: dict[int, str] = {}

    def wait_for_one() -> None:
        child, status = os.wait()
        failed.extend([running.pop(child)] if os.waitstatus_to_exitcode(status) != 0 else [])
        running.pop(child, None)

    gc.freeze()  # the engines collect garbage when they start, which would look through all that was imported, each time
    for name in arguments.families or names:
        child = os.fork()
        if child == 0:
            _answer_and_leave(FAMILIES[name], arguments.folder, answers, who, answer_all)
        running[child] = name
        if len(running) == arguments.jobs:
            wait_for_one()
    while running:
        wait_for_one()
    for name in failed:  # last: what the others have printed may be long
        print(f"{name}: {failure_file(answers, name, who).read_text() if failure_file(answers, name, who).exists() else 'ended'}", file=sys.stderr)
    sys.exit(f"failed: {' '.join(failed)}" if failed else 0)


def failure_file(folder: Path, name: str, who: str) -> Path:
    """Where the error of a family that failed is kept, in one line."""
    return answers_file(folder, name, who).with_suffix(".error")


def _answer_and_leave(family: Family, folder: Path, answers: Path, who: str, answer_all: Callable[[Family, Path], list[Answer]]) -> None:
    status = 1
    written = answers_file(answers, family.name, who)
    written.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_answers(written, answer_all(family, folder / family.name))
        status = 0
    except BaseException as error:
        traceback.print_exc(limit=-12)
        failure_file(answers, family.name, who).write_text(f"{type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
