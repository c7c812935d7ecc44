"""NVRTC, the CUDA compiler that is a library: torch's CUDA wheels bring it.

It makes cubins, and PTX, from our headers alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import os
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MAJORS = (13, 12)  # of CUDA
_MIN_VERSION = (12, 4)
ADVICE = "`pip install nvidia-cuda-nvrtc` (for CUDA 12: nvidia-cuda-nvrtc-cu12) brings it"


@cache
def nvrtc() -> Nvrtc | None:
    """The library, loaded; None where there is none that can be used."""
    for path in _candidates():
        with contextlib.suppress(OSError, AttributeError):
            library = Nvrtc(path)
            if library.version >= _MIN_VERSION:
                return library
    return None


class Nvrtc:
    """A loaded libnvrtc.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it lacks a function.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # NVRTC looks for its built-ins by their name alone: it finds them if they are loaded.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)  # its functions let other Python threads run
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        for name in (
            "CreateProgram",
            "CompileProgram",
            *(f"Get{what}{size}" for what in ("CUBIN", "PTX", "ProgramLog") for size in ("", "Size")),
        ):
            getattr(self._library, f"nvrtc{name}")
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "its version")
        self.version = (major.value, minor.value)

    def __str__(self) -> str:
        return f"NVRTC {self.version[0]}.{self.version[1]} ({self.path})"

    def compile(self, source: str, options: Sequence[str], what: str) -> tuple[bytes, str]:
        """The cubin, or the PTX if the options ask for no GPU's code but for a compute capability, and what
        the compiler said. `what` the source is, for the message.

        Raises:
            RuntimeError: it does not compile; carries the compiler's output.
        """
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
            ),
            what,
        )
        try:
            arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._text(program, "ProgramLog", what).rstrip(b"\0").decode(errors="replace")
            if status:
                raise RuntimeError(f"NVRTC failed on {what}:\n{log}\n{self}: {self._explain(status)}")
            is_ptx = any(option.startswith("--gpu-architecture=compute_") for option in options)
            return self._text(program, "PTX" if is_ptx else "CUBIN", what), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, name: str, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)), what)
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{name}")(program, text), what)
        return text.raw

    def _explain(self, status: int) -> str:
        text: Any = self._library.nvrtcGetErrorString(status)
        return text.decode() if text else f"error {status}"

    def _check(self, status: int, what: str) -> None:
        if status:
            raise RuntimeError(f"{self.path} failed on {what}: {self._explain(status)}")


def _candidates() -> Iterator[str]:
    """Those of the wheels that torch depends on, of torch itself, of the CUDA toolkit, and of the system."""
    for folder in _folders():
        for major in _MAJORS:
            if (folder / f"libnvrtc.so.{major}").is_file():
                yield str(folder / f"libnvrtc.so.{major}")
    for major in _MAJORS:
        yield f"libnvrtc.so.{major}"
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found


def _folders() -> Iterator[Path]:
    namespace = find_spec("nvidia")
    for root in (namespace.submodule_search_locations or []) if namespace else []:
        yield from (Path(root) / "cu13" / "lib", Path(root) / "cuda_nvrtc" / "lib")
    torch = find_spec("torch")
    if torch and torch.origin:
        yield Path(torch.origin).parent / "lib"
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        yield from (Path(home) / "lib64", Path(home) / "targets" / "x86_64-linux" / "lib")
