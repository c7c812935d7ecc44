"""pytest's output for thousands of tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import progress_lines
import pytest

CONFTEST = """
import progress_lines
progress_lines.EVERY_S = 0.2
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress_lines.Progress(config))
"""
TESTS = """
import time
import pytest
@pytest.mark.parametrize("number", range(4))
def test_passes(number):
    time.sleep(0.4)
@pytest.mark.skip(reason="needs a GPU")
def test_is_skipped():
    pass
@pytest.mark.xfail
def test_is_expected_to_fail():
    assert False
def test_fails():
    assert False
def test_passes_late():
    time.sleep(3)
"""


def test_progress_is_lines_instead_of_dots(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | {
        "PYTHONPATH": str(Path(progress_lines.__file__).parent)
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-n", "2", "."]
    done = subprocess.run(command, cwd=tmp_path, env=variables, check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    shown = [line for line in lines if " of 8 tests done" in line]
    assert len(shown) > 1
    numbers = [int(line.partition(" ")[0]) for line in shown]
    assert numbers == sorted(numbers)
    assert any(", 1 failed (" in line for line in shown)
    assert "FAILED test_some.py::test_fails" in lines[: lines.index(shown[-1])], (
        "at once, not only at the end"
    )
    assert not any(re.match(r"(\S+\.py )?[.sxFE]+( |$)", line) for line in lines)
    assert "FAILED test_some.py::test_fails - assert False" in lines
    assert "1 failed, 5 passed, 1 skipped, 1 xfailed" in lines[-1]


@pytest.mark.parametrize(
    ("reasons", "line"),
    [
        ([], ""),
        (
            ["Skipped: needs a CUDA GPU"] * 5100 + ["Skipped: needs nvcc"] * 55,
            "5,155 skipped: 5,100 needs a CUDA GPU, 55 needs nvcc",
        ),
        (
            [f"reason {number}" for number in range(6)],
            "6 skipped: " + ", ".join(f"1 reason {number}" for number in range(6)),
        ),
        (
            ["many"] * 9 + [f"reason {number}" for number in range(8)],
            "17 skipped: 9 many, "
            + ", ".join(f"1 reason {number}" for number in range(5))
            + ", 3 for 3 other reasons (pytest -rs lists them)",
        ),
    ],
)
def test_one_line_counts_skipped_tests_by_reason(reasons: list[str], line: str) -> None:
    assert progress_lines.skipped_line(reasons) == line
