"""The headers that host and device share: each compiles by itself, and their arithmetic is right
(headers_test.cpp).
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from compilation import compile_object

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
COMPILER = shutil.which("g++") or ""
FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]

HOST_FOLDERS = {"cpu", "host", "runtime"}

pytestmark = pytest.mark.skipif(not COMPILER, reason="needs g++")


@pytest.mark.parametrize(
    "header",
    [path for path in sorted(CSRC.rglob("*.h")) if not HOST_FOLDERS & set(path.relative_to(CSRC).parts)],
    ids=lambda path: path.name,
)
def test_compiles_on_its_own(header: Path, emulated: Path) -> None:
    name = str(header.relative_to(CSRC))
    compile_object(
        emulated / f"{name.replace('/', '-')}.o",
        Path("/dev/null"),
        [*FLAGS, "-x", "c++", "-include", name],
        [CSRC],
    )


def test_arithmetic(tmp_path: Path) -> None:
    program = tmp_path / "headers_test"
    sanitize = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    subprocess.run(
        [
            COMPILER,
            *FLAGS,
            f"-I{CSRC}",
            *sanitize,
            str(Path(__file__).with_name("headers_test.cpp")),
            "-o",
            str(program),
        ],
        check=True,
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
