"""What the designs of the attention kernel make of tensors (design_test.cpp)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = shutil.which("g++") or ""


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_arguments_of_launches(tmp_path: Path) -> None:
    program = tmp_path / "design_test"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined", f"-I{CSRC}"]
    subprocess.run([COMPILER, *flags, str(Path(__file__).with_name("design_test.cpp")), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
