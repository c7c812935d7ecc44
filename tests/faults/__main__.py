"""Puts small realistic faults into the sources, one at a time, and reports which ones the tests detect.

    python -m tests.faults [--only TEXT] [--jobs N]

Everything happens in a temporary copy of the working tree. Run it from the root of the repository, with an
interpreter that can run the tests. It builds the copy's host library with cmake, ninja and g++: 30 seconds
once, and a few for each fault in C++. The faults are in fault_table.py. Exit status 0: every fault was
detected.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.fault_table import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
HOST_SOURCES = (".cpp", ".h")  # the sources of the host library
TEST_LIMIT_S = 120  # per test: a fault may make it wait forever
RUN_LIMIT_S = 1800


class Problem(Exception):
    """The reason why a fault cannot be tried."""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the working tree's own files, removed afterwards."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    with tempfile.TemporaryDirectory(prefix="attn_backend_faults_") as folder:
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name)
        yield Path(folder)


@contextmanager
def fault_in(tree: Path, fault: Fault) -> Iterator[None]:
    path = tree / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise Problem(f"{fault.file} holds its text {text.count(fault.old)} times, must be once")
    path.write_text(text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(text)


def run(command: list[str], tree: Path, limit_s: float = RUN_LIMIT_S) -> subprocess.CompletedProcess[str]:
    """Runs a command in the copy, in a separate session, so that nothing stays behind if it waits forever.

    Exit status -SIGKILL: it took too long.
    """
    # a fault may leave a file's size and time stamp (in seconds) unchanged
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONSAFEPATH", None)
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def build(tree: Path) -> None:
    """Builds the host library, initially or again."""
    folder = tree / ".build" / "host"
    if not folder.is_dir():
        options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
        done = run(["cmake", "-S", str(tree), "-B", str(folder), *options], tree)
        if done.returncode:
            raise Problem(f"cmake failed:\n{done.stdout[-3000:]}")
    done = run(["ninja", "-C", str(folder)], tree)
    if done.returncode:
        raise Problem(f"the host library does not compile:\n{done.stdout[-3000:]}")
    (tree / "attn_backend" / "lib").mkdir(exist_ok=True)
    shutil.copy2(folder / "libattn_backend.so", tree / "attn_backend" / "lib")


def fails(tree: Path, tests: tuple[str, ...], jobs: int) -> bool:
    """Whether a test fails, crashes or waits forever.

    Raises:
        Problem: no test ran, or pytest failed to run.
    """
    how = ["-n", str(jobs)] if jobs > 1 else ["-x"]  # with both, the first failure looks like an interruption
    done = run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--timeout={TEST_LIMIT_S}",
            *how,
            *tests,
        ],
        tree,
    )
    if done.returncode == 0 and " passed" not in done.stdout.splitlines()[-1]:
        raise Problem(f"every test of {' '.join(tests)} was skipped here")
    if done.returncode > 1:
        raise Problem(f"pytest {' '.join(tests)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    return done.returncode != 0


def try_fault(tree: Path, fault: Fault, good: dict[tuple[str, ...], bool], jobs: int) -> str:
    """Returns "noticed", or a description of the problem.

    good: selections that have run without a fault, and whether they passed.
    """
    try:
        if fault.tests not in good:
            good[fault.tests] = not fails(tree, fault.tests, jobs)
        if not good[fault.tests]:
            return "NOT CHECKED: its tests fail without it"
        with fault_in(tree, fault):
            if fault.file.endswith(HOST_SOURCES):
                build(tree)
            return "noticed" if fails(tree, fault.tests, jobs) else "NOT NOTICED"
    except Problem as problem:
        return f"NOT CHECKED: {problem}"
    finally:
        if fault.file.endswith(HOST_SOURCES):
            build(tree)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name or file contains this")
    parser.add_argument("--jobs", type=int, default=1, help="tests at a time")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if arguments.only in fault.name or arguments.only in fault.file]
    if not chosen:
        parser.error(f"--only is {arguments.only!r}, must be part of the name or file of a fault")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # the copy is removed with it
    noticed = 0
    good: dict[tuple[str, ...], bool] = {}
    with copied_tree() as tree:
        build(tree)
        where = run(
            [sys.executable, "-c", "import attn_backend; print(attn_backend.__file__)"], tree
        ).stdout.strip()
        if not where.startswith(str(tree.resolve())):
            sys.exit(
                f"error: this interpreter finds attn_backend in {where}, not in the copy: use one without an "
                f"editable install, as that of `make test`"
            )
        for fault in chosen:
            begin = time.monotonic()
            outcome = try_fault(tree, fault, good, arguments.jobs)
            noticed += outcome == "noticed"
            print(f"{fault.name}: {outcome} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{noticed} of {len(chosen)} faults were noticed")
    sys.exit(noticed != len(chosen))


if __name__ == "__main__":
    main()
