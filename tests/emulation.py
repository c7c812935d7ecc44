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


def build(folder: Path, name: str, source: Path, *, header: str = "", options: Sequence[str] = ()) -> ctypes.CDLL:
    """A library in `folder`, compiled from `source` unless it is there: once for all processes that share the folder.

    Args:
        header: text of kernels.h, which the source may include; another one makes another library.
        options: of the compiler.
    """
    place = folder / f"{name}-{hashlib.sha256(header.encode()).hexdigest()[:16]}"
    place.mkdir(exist_ok=True)
    library = place / "kernels.so"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            (place / "kernels.h").write_text(header)
            compiled = library.with_suffix(".tmp")
            # Without GNU's unique symbols: every library of a process has its own inline variables.
            flags = ["-std=c++17", "-w", "-fPIC", "-shared", "-fno-gnu-unique", *options]
            paths = [f"-I{path}" for path in (TESTS / "emulated", ROOT / "csrc", TESTS, place)]
            sources = [str(source), str(TESTS / "emulated" / "cuda_emulation.cpp")]
            subprocess.run([str(COMPILER), *flags, *paths, *sources, "-o", str(compiled)], check=True)
            compiled.rename(library)
    return ctypes.CDLL(str(library))


def check(failure: bytes | None) -> None:
    """failure: what a function of a library returns, whose `restype` is c_char_p.

    Raises:
        DeviceError: it is not None.
    """
    if failure is not None:
        raise DeviceError(failure.decode())
