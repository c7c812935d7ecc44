"""The process whose forks run the engines' programs in tests (forked_engines.py), with another module instead
of an engine.
"""

from __future__ import annotations

import os
import sys

import psutil
import pytest
from forked_engines import Forks, engine_of

PROGRAM = """
import multiprocessing, os, sys

def say(what):
    print(what, sys.argv[1:], os.environ["OURS"], os.getcwd(), "colorsys" in sys.modules, flush=True)

if __name__ == "__main__":
    say("program")
    child = multiprocessing.get_context("spawn").Process(target=say, args=("child",))
    child.start()
    child.join()
    sys.exit(child.exitcode + 3)
"""


@pytest.fixture
def forks(tmp_path):
    made = Forks(["colorsys"], os.environ | {"OURS": "another"}, tmp_path / "forks.log")
    yield made
    made.close()


def test_a_program_runs_as_one_of_its_own(forks, tmp_path):
    source, log = tmp_path / "program.py", tmp_path / "folder" / "program.log"
    source.write_text(PROGRAM)
    program = forks.start([str(source), "one", "two"], log, os.environ | {"OURS": "own"})
    assert program.wait(60) == program.poll() == program.returncode == 3
    first, *said = log.read_text().splitlines()
    assert first == f"$ {sys.executable} {source} one two"
    assert said == [f"{who} ['one', 'two'] own {log.parent} True" for who in ("program", "child")]


def test_a_module_is_run_and_ended(forks, tmp_path):
    program = forks.start(
        ["-m", "http.server", "--bind", "127.0.0.1", "0"], tmp_path / "server.log", os.environ.copy()
    )
    with pytest.raises(psutil.TimeoutExpired):
        program.wait(0.1)
    assert program.poll() is None
    assert os.getsid(program.pid) == program.pid != os.getsid(0)
    program.kill()
    assert program.wait(60) == -9


def test_what_cannot_be_imported_is_told(tmp_path):
    forks = Forks(["no_such_module"], os.environ.copy(), tmp_path / "forks.log")
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        forks.ask("poll", 1)
    forks.close()


@pytest.mark.parametrize(
    ("arguments", "engine"),
    [
        (["-m", "vllm.entrypoints.cli.main", "serve"], "vllm"),
        (["-m", "sglang.launch_server", "--model-path"], "sglang"),
        (["integration/bench_client.py", "sglang.bench_serving", "{}"], "sglang"),
        (["-m", "http.server"], None),
    ],
)
def test_which_engine_a_command_runs(arguments, engine):
    assert engine_of([sys.executable, *arguments]) == engine
    assert engine_of(["another", *arguments]) is None
