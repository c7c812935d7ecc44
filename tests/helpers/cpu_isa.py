"""Instruction sets of the CPU kernels, and whether this machine has them. The library would silently replace
a missing one with the best available.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

ISAS = ("baseline", "avx2", "avx512", "amx")  # as in csrc/common/cpu/isa.h

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("g++")
PROGRAM = """
#include "common/cpu/isa.h"
int main() { return static_cast<int>(attn::cpu::current_isa()); }
"""


def environment(isa: str) -> dict[str, str]:
    """The environment of a process that uses `isa`; skips the test if this CPU lacks `isa`, or if that is
    unknown.
    """
    if COMPILER is None:
        pytest.skip("needs g++, to ask for the instruction sets of this CPU")
    if ISAS.index(isa) > ISAS.index(used(ISAS[-1])):
        pytest.skip(f"this CPU has no {isa}")
    assert used(isa) == isa
    return os.environ | {"ATTN_BACKEND_CPU_ISA": isa}


@cache
def used(wanted: str) -> str:
    """The instruction set that the library uses if `wanted` is requested; compiles only
    csrc/common/cpu/isa.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder) / "isa.cpp", Path(folder) / "isa"
        source.write_text(PROGRAM)
        command = [
            str(COMPILER),
            "-std=c++17",
            f"-I{ROOT / 'csrc'}",
            str(source),
            str(ROOT / "csrc" / "common" / "cpu" / "isa.cpp"),
            "-o",
            str(program),
        ]
        subprocess.run(command, check=True)
        done = subprocess.run([str(program)], env=os.environ | {"ATTN_BACKEND_CPU_ISA": wanted}, check=False)
    return ISAS[done.returncode]
