"""The threads of the CPU executor, especially in a child after fork() (parallel_test.cpp): vLLM and data
loaders fork.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "helpers"
COMPILER = shutil.which("g++") or ""
LIMIT_S = 60  # a child that waits for threads that do not exist waits forever

IN_PYTHON = """
import os, sys
sys.path.insert(0, sys.argv[1])
import case_tensors, cases, torch

torch.set_num_threads(4)
spec = cases.Spec((300, 1, 200), (2000, 4000, 900), num_kv_heads=4, dtype=torch.float32)
case = case_tensors.build(spec, "cpu")
attention = case.attention()

def result():     # without torch's own loops: those wait in such a child
    attention.plan(case.view)
    return case.run(attention, out=case.out, lse=case.lse).numpy().tobytes()

expected = result()
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(result() != expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert result() == expected
"""


IN_FORKED_CHILDREN = """
import os, sys
sys.path.insert(0, sys.argv[1])
import case_tensors, cases, torch

torch.set_num_threads(4)
torch.zeros(1 << 24)     # torch's threads exist, and are gone in a child
spec = cases.Spec((300, 1, 200), (2000, 4000, 900), num_kv_heads=4, dtype=torch.float32)
case = case_tensors.build(spec, "cpu")
small = case.attention()
small.plan(case.view)
expected = case.run(small, out=case.out, lse=case.lse).clone()

def make_a_larger_attention():
    large = small.with_room(max_rows=100_000, max_batch=1000)
    assert large._schedule.numel() > 1 << 18     # torch uses one thread for 1 << 15
    assert not large._schedule.numpy().any()
    large.plan(case.view)
    out = case.run(large, out=case.out, lse=case.lse)
    assert out.numpy().tobytes() == expected.numpy().tobytes()

def use_one_thread_of_torch():
    torch.set_num_threads(1)
    assert not torch.zeros(1 << 24).any()

for work in (make_a_larger_attention, use_one_thread_of_torch):
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(work.__name__, repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, work.__name__
"""


def check_run(command: list[str], environment: dict[str, str]) -> None:
    """Runs it in a separate session, so that children that wait forever are ended with it."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output[-3000:]


@pytest.mark.skipif(not COMPILER, reason="needs g++")
@pytest.mark.parametrize("openmp", [True, False], ids=["OpenMP", "own threads"])
def test_loops_before_and_after_fork(openmp: bool, tmp_path: Path) -> None:
    """With and without an OpenMP runtime in the process."""
    program = tmp_path / "parallel_test"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{ROOT / 'csrc'}"]
    libraries = ["-ldl", *(["-Wl,--no-as-needed", "-lgomp"] if openmp else [])]
    sources = [
        str(Path(__file__).with_name("parallel_test.cpp")),
        str(ROOT / "csrc" / "common" / "cpu" / "parallel.cpp"),
    ]
    subprocess.run([COMPILER, *flags, *sources, "-o", str(program), *libraries], check=True)
    arguments = [] if openmp else ["own-threads"]
    check_run([str(program), *arguments], {**os.environ, "OMP_NUM_THREADS": "4"})


def test_attention_after_fork() -> None:
    check_run(
        [sys.executable, "-c", IN_PYTHON, str(HELPERS)],
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_what_a_forked_child_may_do() -> None:
    """The child may make an Attention of any size. docs/how_it_works.md promises both."""
    check_run(
        [sys.executable, "-c", IN_FORKED_CHILDREN, str(HELPERS)],
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
