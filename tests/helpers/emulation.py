"""Device code, compiled for this CPU with tests/csrc/emulated/ instead of CUDA."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path

from compilation import ROOT, compile_object, link

TESTS = ROOT / "tests" / "csrc"


class DeviceError(AssertionError):
    """An error that the emulation found in a kernel: threads that wait forever, memory that is read too
    early, ...
    """


# Without GNU's unique symbols, so that each library of a process has separate inline variables.
_FLAGS = ["-std=c++17", "-w", "-Wno-psabi", "-fPIC", "-fno-gnu-unique"]
_INCLUDES = [TESTS / "emulated", ROOT / "csrc", TESTS]


def build(
    folder: Path,
    name: str,
    source: Path,
    *,
    header: str = "",
    options: Sequence[str] = (),
    precompiled: Path | None = None,
) -> ctypes.CDLL:
    """A library in `folder`, compiled from `source` and the emulation unless it exists (compilation.py).

    Args:
        header: text of kernels.h, which the source may include; each text makes another library.
        options: of the compiler.
        precompiled: as in compile_object().
    """
    stem = f"{name}-{hashlib.sha256(header.encode()).hexdigest()[:16]}"
    made = compile_object(folder / f"{stem}.o", source, [*_FLAGS, *options], _INCLUDES, header, precompiled)
    return ctypes.CDLL(str(link(folder / f"{stem}.so", [made, cuda_emulation(folder)])))


def cuda_emulation(folder: Path) -> Path:
    """The functions of the emulation that every library has."""
    return compile_object(
        folder / "cuda_emulation.o", TESTS / "emulated" / "cuda_emulation.cpp", [*_FLAGS, "-O2"], _INCLUDES
    )


def check(failure: bytes | None) -> None:
    """failure: the result of a library function whose `restype` is c_char_p.

    Raises:
        DeviceError: it is not None.
    """
    if failure is not None:
        raise DeviceError(failure.decode())
