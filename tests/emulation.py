"""Device code, compiled for this CPU with tests/csrc/emulated/ in the place of CUDA."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from host_planner import COMPILER, ROOT

TESTS = ROOT / "tests" / "csrc"


class DeviceError(AssertionError):
    """What the emulation found wrong with a kernel: threads that wait for ever, memory that is read too early, ..."""


# Without GNU's unique symbols: every library of a process has its own inline variables.
_FLAGS = ["-std=c++17", "-w", "-Wno-psabi", "-fPIC", "-fno-gnu-unique"]


def build(folder: Path, name: str, source: Path, *, header: str = "", options: Sequence[str] = ()) -> ctypes.CDLL:
    """A library in `folder`, compiled from `source` unless it is there: once for all processes that share the folder.

    Args:
        header: text of kernels.h, which the source may include; another one makes another library.
        options: of the compiler.
    """
    place = folder / f"{name}-{hashlib.sha256(header.encode()).hexdigest()[:16]}"
    place.mkdir(exist_ok=True)
    return ctypes.CDLL(str(_compiled(place / "kernels.so", ["-shared", *options], [source, _emulation(folder)], header)))


def _emulation(folder: Path) -> Path:
    """What every library has of the emulation, compiled once."""
    return _compiled(folder / "cuda_emulation.o", ["-c", "-O2"], [TESTS / "emulated" / "cuda_emulation.cpp"])


def _compiled(target: Path, options: Sequence[str], sources: Sequence[Path], header: str | None = None) -> Path:
    """target, compiled from sources unless it is there. header: text of a kernels.h beside it."""
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".tmp")
            if header is not None:
                (target.parent / "kernels.h").write_text(header)
            paths = [f"-I{path}" for path in (TESTS / "emulated", ROOT / "csrc", TESTS, target.parent)]
            subprocess.run([str(COMPILER), *_FLAGS, *options, *paths, *map(str, sources), "-o", str(partial)], check=True)
            partial.rename(target)
    return target


def check(failure: bytes | None) -> None:
    """failure: what a function of a library returns, whose `restype` is c_char_p.

    Raises:
        DeviceError: it is not None.
    """
    if failure is not None:
        raise DeviceError(failure.decode())
