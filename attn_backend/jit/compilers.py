"""The compilers on this machine: nvcc, NVRTC (the library that comes with torch) and a C++ compiler.

Needs only the standard library, because CMake and the pre-installation checks use it. CMake runs `python -m
attn_backend.jit.compilers CSRC`, which prints the digest of the headers.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import hashlib
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .manifest import HeadDims

_ELF, _FATBIN, _PTX = b"\x7fELF", b"\x50\xed\x55\xba", b"//"
_EM_CUDA, _ET_DYN, _SHT_NOBITS = 190, 3, 8
_ELF_BYTES, _SECTION_BYTES, _FATBIN_BYTES = 64, 64, 16  # header sizes


def damage(cubin: bytes, for_gpu: bool = True) -> str:
    """Why this is not a complete cubin, fatbin or NVRTC PTX, or not a complete shared library for this
    machine's CPU; "" if it is.
    """
    if not cubin:
        return "is empty"
    if for_gpu and cubin.startswith(_FATBIN):
        if len(cubin) < _FATBIN_BYTES:
            return "is truncated"
        header, rest = struct.unpack_from("<HQ", cubin, 6)
        return "is truncated" if len(cubin) < header + rest else ""
    if for_gpu and cubin.startswith(_PTX):
        return "" if cubin.endswith(b"\0") else "is truncated"
    if not cubin.startswith(_ELF):
        return "is neither a cubin nor a fatbin" if for_gpu else "is not an ELF file"
    if len(cubin) < _ELF_BYTES:
        return "is truncated"
    (machine,), (segments, sections) = (
        struct.unpack_from("<H", cubin, 18),
        struct.unpack_from("<QQ", cubin, 32),
    )
    if (machine == _EM_CUDA) != for_gpu:
        return "is an ELF file for another machine than a GPU" if for_gpu else "is an ELF file for a GPU"
    if not for_gpu and (cubin[4:6], cubin[16:18], cubin[18:20]) != _shared_library():
        return "is no shared library for this machine"
    segment_bytes, num_segments, _, num_sections, names = struct.unpack_from("<HHHHH", cubin, 54)
    end = max(segments + num_segments * segment_bytes, sections + num_sections * _SECTION_BYTES)
    if end > len(cubin) or names >= max(num_sections, 1):
        return "is truncated"
    for at in range(sections, sections + num_sections * _SECTION_BYTES, _SECTION_BYTES):
        (kind,), (offset, size) = (
            struct.unpack_from("<I", cubin, at + 4),
            struct.unpack_from("<QQ", cubin, at + 24),
        )
        if kind != _SHT_NOBITS and offset + size > len(cubin):
            return "is truncated"
    return ""


@cache
def _shared_library() -> tuple[bytes, bytes, bytes]:
    """Header fields of this machine's shared libraries: class and byte order, type, machine."""
    with open("/proc/self/exe", "rb") as file:
        header = file.read(_ELF_BYTES)
    return header[4:6], _ET_DYN.to_bytes(2, sys.byteorder), header[18:20]


NVCC_TIME_LIMIT = 600.0  # seconds for one kernel; the slowest take less than a tenth of it on one core
VERSION_TIME_LIMIT = 60.0
NVCC_ADVICE = "set CUDA_HOME or PATH to a CUDA toolkit (12.4 or newer)"
_running: set[subprocess.Popen[bytes]] = set()


def nvcc() -> str | None:
    """Path of the CUDA compiler, from CUDA_HOME, PATH or the usual place; None if none is found."""
    return next(
        (path for path in nvcc_candidates() if os.path.isfile(path) and os.access(path, os.X_OK)), None
    )


def no_nvcc() -> str:
    """The message that nvcc was not found, with a remedy."""
    useless = "".join(
        f" ({path} is not an executable file)" for path in nvcc_candidates() if os.path.exists(path)
    )
    return f"no nvcc was found{useless}: {NVCC_ADVICE}, or install a wheel that has the cubins"


@cache
def nvcc_version(compiler: str) -> str:
    """The line of `nvcc --version` that names the build.

    Raises:
        RuntimeError: there is no such line.
    """
    lines = run_compiler([compiler, "--version"], "its version", VERSION_TIME_LIMIT).split("\n")
    version = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if not version:
        raise RuntimeError(f"{compiler} --version says nothing: {NVCC_ADVICE}")
    return version


def run_compiler(command: list[str], what: str, seconds: float, advice: str = NVCC_ADVICE) -> str:
    """Runs a compiler and returns its output.

    `what`: the input, for messages; `advice`: for the message that the compiler cannot be run.

    Raises:
        RuntimeError: it cannot be run, fails, is killed or takes too long. It and its child processes are
            then gone.
    """
    compiler = command[0]
    # not a pipe: the call would wait for any grandchild that keeps the pipe open
    with scratch_file("output") as path, path.open("w+b") as output:
        try:
            # A new process group, so that its children are killed with it. No input, so that it never waits.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"{compiler} cannot be run: {error.strerror}; {advice}") from error
        _running.add(process)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            busy = "if the machine is busy, run `attn-backend compile --jobs 1` later"
            raise RuntimeError(
                f"{compiler} took more than {seconds:g} s for {what} and was ended: {busy}; else {advice}"
            ) from None
        finally:
            _kill(process)
            _running.discard(process)
        text = path.read_bytes().decode(errors="replace")
    if status < 0:
        needs_less = "if memory ran out, `attn-backend compile --jobs 1` needs less"
        raise RuntimeError(
            f"{compiler} was killed by signal {-status} on {what}; {needs_less}\n{text}".rstrip()
        )
    if status:
        raise RuntimeError(
            f"{Path(compiler).name} failed on {what}:\n{text}{compiler} ended with exit status {status}"
        )
    return text


def stop_compilers() -> None:
    """Stops all running compilers, in any thread."""
    for process in list(_running):
        _kill(process)


@contextlib.contextmanager
def scratch_file(name: str) -> Iterator[Path]:
    """A file for a compiler to write, in a folder that is removed afterwards.

    Raises:
        RuntimeError: it cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="attn_backend-") as folder:
            yield Path(folder) / name
    except OSError as error:
        raise RuntimeError(
            f"{error.filename or 'the temporary folder'} cannot be written: {error.strerror}; set TMPDIR to "
            f"a folder that has room"
        ) from error


def nvcc_candidates() -> list[str]:
    home = os.environ.get("CUDA_HOME")
    named = [f"{home}/bin/nvcc"] if home else []
    return [*named, *filter(None, [shutil.which("nvcc")]), "/usr/local/cuda/bin/nvcc"]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a compiler and its child processes."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


_MAJORS = (13, 12)  # CUDA major versions
_MIN_VERSION = (12, 4)
NVRTC_ADVICE = "`pip install nvidia-cuda-nvrtc` (for CUDA 12: nvidia-cuda-nvrtc-cu12) brings it"


@cache
def nvrtc() -> Nvrtc | None:
    """The loaded library; None if no usable one is found."""
    for path in _nvrtc_candidates():
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
        # NVRTC looks up its built-ins by file name only, and finds them if they are already loaded.
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(path)  # calls release the GIL
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
        """Returns the cubin (PTX if the options name a virtual architecture) and the compiler's output.
        `what`: the source, for messages.

        Raises:
            RuntimeError: it does not compile; the message has the compiler's output.
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


def _nvrtc_candidates() -> Iterator[str]:
    """Paths in the wheels that torch depends on, in torch itself, in the CUDA toolkit, and in the system."""
    for folder in _nvrtc_folders():
        for major in _MAJORS:
            if (folder / f"libnvrtc.so.{major}").is_file():
                yield str(folder / f"libnvrtc.so.{major}")
    for major in _MAJORS:
        yield f"libnvrtc.so.{major}"
    if found := ctypes.util.find_library("nvrtc"):
        yield found


def _nvrtc_folders() -> Iterator[Path]:
    namespace = find_spec("nvidia")
    for root in (namespace.submodule_search_locations or []) if namespace else []:
        yield from (Path(root) / "cu13" / "lib", Path(root) / "cuda_nvrtc" / "lib")
    torch = find_spec("torch")
    if torch and torch.origin:
        yield Path(torch.origin).parent / "lib"
    for home in filter(None, (os.environ.get("CUDA_HOME"), "/usr/local/cuda")):
        yield from (Path(home) / "lib64", Path(home) / "targets" / "x86_64-linux" / "lib")


CPP_ELEMENTS = {"float32": "float", "float16": "Half", "bfloat16": "BFloat16"}  # by torch's names
_CPP_TIME_LIMIT = 600.0
_CPP_ADVICE = "install g++, or set CXX to a C++ compiler"

# The same flags as csrc/common/cpu/isa.cmake.
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISA_FLAGS = {
    "baseline": [],
    "avx2": _AVX2,
    "avx512": _AVX512,
    "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
_VECTORS = {"baseline": "Baseline", "avx2": "Avx2", "avx512": "Avx512"}


def cpp_compiler() -> list[str] | None:
    """The command of the C++ compiler: CXX, or else the first of the usual names; None if none exists."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        try:
            command = shlex.split(name)
        except ValueError:  # no_cpp_compiler() reports the reason
            return None
        path = shutil.which(command[0]) if command else None
        if path:
            return [path, *command[1:]]
    return None


def no_cpp_compiler() -> str:
    """The message that no C++ compiler was found, with a remedy."""
    wanted = os.environ.get("CXX")
    if not wanted:
        return f"no C++ compiler was found: {_CPP_ADVICE}"
    try:
        shlex.split(wanted)
    except ValueError as error:
        return f"CXX is {wanted!r}, which is no command ({error}): {_CPP_ADVICE}"
    return f"CXX is {wanted!r}, which is not a program here: {_CPP_ADVICE}"


def isa_of(isa: str, dtype: str, head_dim: int | HeadDims) -> str:
    """The instruction set that attention uses when `isa` is selected (csrc/attention/cpu/executor.cpp): AMX
    multiplies only bfloat16.
    """
    return (
        "avx512"
        if isa == "amx" and (dtype != "bfloat16" or any(dim % 32 for dim in HeadDims.of(head_dim)))
        else isa
    )


def cpp_source(isa: str, dtype: str, widens: bool = False) -> str:
    """The text after the source of a variant. isa: from isa_of(). widens: for caches with scales."""
    if isa == "amx":
        engine, headers = "attn::cpu::AmxEngine", ["attention/cpu/amx_engine.h"]
    else:
        element = CPP_ELEMENTS[dtype] if dtype == "float32" else f"attn::cpu::{CPP_ELEMENTS[dtype]}"
        engine, headers = (
            f"attn::cpu::Float32Engine<attn::cpu::{_VECTORS[isa]}, {element}>",
            ["attention/cpu/float32_engine.h", f"common/cpu/vector_{isa}.h"],
        )
    includes = "".join(f'#include "{header}"\n' for header in (*headers, "attention/cpu/variant_kernels.h"))
    variant = "attn::WithScales<attn::UserVariant>" if widens else "attn::UserVariant"
    return f"#define ATTN_VARIANT_ENGINE {engine}\n#define ATTN_VARIANT {variant}\n{includes}"


def cpp_flags(isa: str) -> list[str]:
    return [
        "-std=c++17",
        "-O3",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-DNDEBUG",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-w",
        *ISA_FLAGS[isa],
    ]


def compile_library(
    command: list[str], text: str, isa: str, headers: Path, digest: str, what: str
) -> tuple[bytes, str]:
    """Compiles a shared library; returns its content and the compiler's output. digest: headers_digest() of
    `headers`.

    Raises:
        RuntimeError: compilation failed, or did not produce a shared library for this machine; the message
            has the compiler's output.
    """
    with scratch_file("variant.so") as library:
        file = library.with_suffix(".cpp")
        file.write_text(text)
        own = [f"-I{headers}", f'-DATTN_HEADERS_DIGEST="{digest}"', str(file), "-o", str(library)]
        said = run_compiler([*command, *cpp_flags(isa), *own], what, _CPP_TIME_LIMIT, _CPP_ADVICE)
        content = library.read_bytes() if library.is_file() else None
        fault = "is missing" if content is None else damage(content, for_gpu=False)
        if content is None or fault:
            raise RuntimeError(
                f"{' '.join(command)} reported no error on {what}, but its output {fault}: "
                f"{_CPP_ADVICE}\n{said}".rstrip()
            )
        return content, said


@cache
def headers_digest(csrc: Path) -> str:
    """The digest of all .h files below a folder."""
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(csrc).as_posix(), path) for path in csrc.rglob("*.h")):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


if __name__ == "__main__":
    print(headers_digest(Path(sys.argv[1])))
