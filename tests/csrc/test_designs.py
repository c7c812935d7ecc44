"""How the designs of the attention kernel interpret tensors (design_test.cpp)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from attn_backend.jit.manifest import MULTIPLIED_FLOAT8_HEAD_DIMS

CSRC = Path(__file__).resolve().parents[2] / "csrc"
COMPILER = shutil.which("g++") or ""


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_arguments_of_launches(tmp_path: Path) -> None:
    program = tmp_path / "design_test"
    flags = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-O1",
        "-fsanitize=undefined",
        "-fno-sanitize-recover=undefined",
        f"-I{CSRC}",
    ]
    subprocess.run(
        [COMPILER, *flags, str(Path(__file__).with_name("design_test.cpp")), "-o", str(program)], check=True
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.skipif(not COMPILER, reason="needs g++")
def test_heads_whose_8_bit_elements_are_multiplied_are_those_of_the_manifest(tmp_path: Path) -> None:
    """If Python expects more, kernels silently dequantize instead."""
    asserts = [
        f"static_assert(attn::sm90::multiplies_float8(attn::HeadDims{{{qk}, {v}}}) == "
        f"{str((qk, v) in MULTIPLIED_FLOAT8_HEAD_DIMS).lower()});"
        for qk in range(8, 600, 8)
        for v in {qk, 128, 512}
    ]
    source = tmp_path / "heads.cpp"
    source.write_text("\n".join(['#include "attention/sm90/shape.h"', *asserts, ""]))
    subprocess.run([COMPILER, "-std=c++17", "-fsyntax-only", f"-I{CSRC}", str(source)], check=True)
