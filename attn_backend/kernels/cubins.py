"""Device kernels as cubins: which exist, where they are found, how one is compiled.

A kernel is one file in csrc/device: `plan.cu`, `append.cu` and every file of `instances/`. It is looked for in the package
(`cubins/<arch>/<name>.cubin`, put there when the wheel was built), then in the cache under a key that hashes everything the compiler
would read, and is compiled into the cache with nvcc when it is in neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from . import code_address
from .library import PACKAGE

ARCHS = ("sm_90a", "sm_80")
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def source_root() -> Path:
    """The folder csrc/: beside the package in a checkout, inside it when installed."""
    inside = PACKAGE / "csrc"
    return inside if inside.is_dir() else PACKAGE.parent / "csrc"


def kernel_sources(arch: str) -> dict[str, Path]:
    """Every standard kernel's name and source file; those that begin with `hopper_` are for sm_90a only."""
    device = source_root() / "device"
    paths = sorted([*device.glob("*.cu"), *device.glob("instances/*.cu")])
    return {path.stem: path for path in paths if arch == "sm_90a" or not path.stem.startswith("hopper_")}


def cache_dir() -> Path:
    """Where compiled cubins are kept: ATTN_BACKEND_CACHE, or attn_backend/ in the user's cache folder."""
    explicit = os.environ.get("ATTN_BACKEND_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn_backend"


def arch_of(capability: tuple[int, int]) -> str:
    """The arch whose build serves a GPU of this compute capability.

    Raises:
        ValueError: older than Ampere.
    """
    if capability == (9, 0):
        return "sm_90a"
    if capability >= (8, 0):
        return "sm_80"
    raise ValueError(f"compute capability is {capability[0]}.{capability[1]}, must be at least 8.0 (Ampere)")


def nvcc() -> str | None:
    """Path of the CUDA compiler, from CUDA_HOME, PATH or the usual place; None when there is none."""
    home = os.environ.get("CUDA_HOME")
    for candidate in ([f"{home}/bin/nvcc"] if home else []) + [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]:
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    return None


@cache
def nvcc_version(compiler: str) -> str:
    """The line of `nvcc --version` that names the build."""
    text = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    return text.strip().splitlines()[-1]


def flags(arch: str) -> list[str]:
    """Compiler flags of an arch. sm_80 carries its PTX, so that every newer GPU can run it."""
    root = source_root()
    common = ["-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{root}", f"-I{root / 'include'}", "-Xptxas=-v"]
    if arch == "sm_90a":
        return [*common, "-gencode=arch=compute_90a,code=sm_90a", "-cubin"]
    return [*common, "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-fatbin"]


def _included(source: Path, seen: set[Path]) -> Iterator[Path]:
    """`source` and every file of ours that it includes, each once."""
    if source in seen:
        return
    seen.add(source)
    yield source
    root = source_root()
    for name in _INCLUDE.findall(source.read_text()):
        for folder in (source.parent, root, root / "include"):
            if (folder / name).is_file():
                yield from _included((folder / name).resolve(), seen)
                break


def cache_key(source: Path, arch: str, compiler: str) -> str:
    """Hash of the sources that are read, the flags, the compiler and the arch."""
    digest = hashlib.sha256()
    root = source_root()
    for path in sorted(_included(source.resolve(), set())):
        digest.update(str(path.relative_to(root.resolve())).encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(Path(code_address.__file__).read_bytes())
    digest.update("\0".join([arch, nvcc_version(compiler), *(flag for flag in flags(arch) if not flag.startswith("-I"))]).encode())
    return digest.hexdigest()[:24]


def cached_kernel(name: str, arch: str, compiler: str) -> Path:
    """Where the cache holds a kernel, whether or not it is there."""
    return cache_dir() / arch / f"{name}-{cache_key(kernel_sources(arch)[name], arch, compiler)}.cubin"


def compile_kernel(name: str, arch: str) -> tuple[Path, str]:
    """Compiles a kernel into the cache, unless it is there. Returns the file and the compiler's resource report.

    Raises:
        ValueError: no kernel of that name.
        RuntimeError: no compiler, or it failed; carries its output.
    """
    sources = kernel_sources(arch)
    if name not in sources:
        raise ValueError(f"kernel is {name!r}, must be one of {', '.join(sources)}")
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError(
            f"kernel {name} for {arch} is neither in the package nor compilable: no nvcc was found (set CUDA_HOME, or install a wheel with cubins)"
        )
    target = cached_kernel(name, arch, compiler)
    report = target.with_suffix(".txt")
    if target.exists() and report.exists():
        return target, report.read_text()
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{name}-", suffix=".cubin")
    os.close(handle)
    try:
        done = subprocess.run([compiler, *flags(arch), str(sources[name]), "-o", partial], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed on kernel {name} for {arch}:\n{done.stdout}{done.stderr}")
        code_address.publish_code_addresses(Path(partial))
        text = done.stdout + done.stderr
        partial_report = f"{partial}.txt"
        Path(partial_report).write_text(text)
        os.replace(partial_report, report)
        os.replace(partial, target)  # last: whoever sees the cubin sees a whole one
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    return target, text


@cache
def find_kernel(name: str, arch: str) -> Path:
    """The cubin of a kernel: from the package, from the cache, or compiled now.

    Raises:
        RuntimeError: it is nowhere and cannot be compiled.
    """
    shipped = PACKAGE / "cubins" / arch / f"{name}.cubin"
    return shipped if shipped.exists() else compile_kernel(name, arch)[0]
