"""The headers that host and device share: each compiles on its own, and their arithmetic is right (headers_test.cpp)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
COMPILER = shutil.which("g++") or ""
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]

HOST_FOLDERS = {"cpu", "host", "runtime"}

pytestmark = pytest.mark.skipif(not COMPILER, reason="needs g++")


@pytest.mark.parametrize(
    "header", [path for path in sorted(CSRC.rglob("*.h")) if not HOST_FOLDERS & set(path.relative_to(CSRC).parts)], ids=lambda path: path.name
)
def test_compiles_on_its_own(header: Path) -> None:
    command = [COMPILER, *FLAGS, "-fsyntax-only", "-x", "c++", "-include", str(header), "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_arithmetic(tmp_path: Path) -> None:
    program = tmp_path / "headers_test"
    sanitize = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run([COMPILER, *FLAGS, *sanitize, str(Path(__file__).with_name("headers_test.cpp")), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
