"""Device kernels as cubins: which exist, where they are found, how one is compiled.

The manifest (manifest.py) lists the kernels and has their sources. A kernel is looked for in the package
(`cubins/<arch>/<name>.cubin`, put there when the wheel was built), then in the cache (kernel_cache.py) under
a key that hashes everything the compiler would read. It is compiled into the cache with nvcc
(cuda_compiler.py) when it is in neither, or damaged.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from ..settings import Settings
from . import code_address, cuda_compiler, kernel_cache, manifest
from .archs import BUILDS, runnable_archs
from .cuda_compiler import nvcc, nvcc_version
from .kernel_cache import cache_dir

logger = logging.getLogger("attn_backend")

# Not from library.py, which imports tvm-ffi: `make wheel` compiles the kernels without it.
PACKAGE = Path(__file__).resolve().parent.parent
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


def source_root() -> Path:
    """The folder csrc/: beside the package in a checkout, inside it when installed."""
    inside = PACKAGE / "csrc"
    return inside if inside.is_dir() else PACKAGE.parent / "csrc"


def kernel_sources(arch: str) -> dict[str, str]:
    """Name and source of every kernel that is built ahead of time."""
    return {name: kernel.source for name, kernel in manifest.kernels(arch).items()}


def _source_of(name: str, arch: str) -> str:
    """The source of a kernel that is built ahead of time, or of one for another head_dim.

    Raises:
        ValueError: no kernel of that name.
    """
    sources = kernel_sources(arch)
    source = sources[name] if name in sources else manifest.source_of(name, arch)
    if source is None:
        raise ValueError(f"kernel is {name!r}, must be one of {', '.join(sources)}, or of another head_dim")
    return source


def arch_of(capability: tuple[int, int]) -> str:
    """The arch whose build serves a GPU of this compute capability: ATTN_BACKEND_ARCH, or the one that is
    made for it.

    Raises:
        ValueError: older than Ampere, or ATTN_BACKEND_ARCH is an arch that it cannot run.
    """
    if capability < (8, 0):
        raise ValueError(
            f"compute capability is {capability[0]}.{capability[1]}, must be at least 8.0 (Ampere)"
        )
    runnable = runnable_archs(capability)
    wanted = Settings.read().arch or runnable[0]
    if wanted not in runnable:
        must_be = " or ".join(repr(arch) for arch in runnable)
        raise ValueError(
            f"ATTN_BACKEND_ARCH is {wanted!r}, must be {must_be} on a GPU of compute capability "
            f"{capability[0]}.{capability[1]}"
        )
    return wanted


COMMON_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v")


def flags(arch: str) -> list[str]:
    """Compiler flags of an arch. sm_80 carries its PTX, so that every newer GPU can run it."""
    return [*COMMON_FLAGS, f"-I{source_root()}", *BUILDS[arch].flags]


def _include(source: str, root: Path, files: dict[str, str]) -> None:
    """Adds to `files` the text of every file of csrc/ that a source includes, directly or not, by its name
    there.
    """
    for name in _INCLUDE.findall(source):
        if name in files:
            continue
        try:
            text = (root / name).read_text()
        except (FileNotFoundError, NotADirectoryError):
            continue
        files[name] = text
        _include(text, root, files)


def cache_key(source: str, arch: str, compiler: str) -> str:
    """Two hashes: of the source, of what it includes, the flags and the arch; and of the compiler."""
    return f"{_source_key(source, arch)}-{hashlib.sha256(nvcc_version(compiler).encode()).hexdigest()[:8]}"


def _source_key(source: str, arch: str) -> str:
    return content_key(source, [arch, *(flag for flag in flags(arch) if not flag.startswith("-I"))])


def content_key(source: str, how: Sequence[str]) -> str:
    """Hash of a source, of what it includes, and of all else that decides what it is compiled to."""
    digest, root = hashlib.sha256(source.encode()), source_root()
    files: dict[str, str] = {}
    _include(source, root, files)
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]}\0".encode())
    digest.update(code_address.recipe())
    digest.update("\0".join(how).encode())
    return digest.hexdigest()[:24]


def cached_kernel(name: str, arch: str, compiler: str) -> Path:
    """Where the cache keeps a kernel, which may be missing or damaged."""
    return cache_dir() / arch / f"{name}-{cache_key(_source_of(name, arch), arch, compiler)}.cubin"


def _cached_by_any_compiler(name: str, arch: str) -> Path | None:
    """A whole kernel of the cache, of the present source; compiled by whatever nvcc another machine had."""
    pattern = f"{name}-{_source_key(_source_of(name, arch), arch)}-*.cubin"
    folder = kernel_cache.place(cache_dir() / arch / pattern)[0].parent
    return next((entry for entry in sorted(folder.glob(pattern)) if not kernel_cache.fault(entry)), None)


def shipped_kernel(name: str, arch: str) -> Path:
    """Where the package has a kernel, which may be missing or damaged."""
    return PACKAGE / "cubins" / arch / f"{name}.cubin"


def shipped_fault(cubin: Path) -> str:
    """Why a cubin of the package is not given to the driver; "" if it is.

    The installer has compared it with the wheel: here it is only checked to be whole.
    """
    try:
        damage = kernel_cache.damage(cubin.read_bytes())
    except OSError as error:
        return f"{cubin} cannot be read: {error.strerror}"
    return f"{cubin} {damage}" if damage else ""


def compile_kernel(name: str, arch: str) -> tuple[Path, str]:
    """Compiles a kernel into the cache, unless it is there and whole.

    Returns the file and the compiler's resource report.

    Raises:
        ValueError: no kernel of that name.
        RuntimeError: no compiler, or it failed; carries its output. Or the result cannot be kept.
    """
    source = _source_of(name, arch)
    path = nvcc()
    if path is None:
        raise RuntimeError(
            f"kernel {name} for {arch} is neither in the package nor compilable: {cuda_compiler.no_nvcc()}"
        )
    cached = cached_kernel(name, arch, path)
    target, reason = kernel_cache.place(cached)
    if reason:
        warn_of_private_folder(target, reason)
    if kernel_cache.fault(target):
        kernel_cache.prepare(target)
        what = f"kernel {name} for {arch}"
        with kernel_cache.locked(
            target,
            cuda_compiler.TIME_LIMIT,
            lambda: logger.info("attn_backend: waiting for another process that compiles %s", what),
        ):
            if kernel_cache.fault(target):
                kernel_cache.store(target, *compile_source(name, source, flags(arch), path, what))
    return target, kernel_cache.report(target)


def warn_of_private_folder(target: Path, reason: str) -> None:
    """Says, once in a process, that an entry is not kept in the cache."""
    advice = (
        ""
        if "ATTN_BACKEND_CACHE" in reason
        else " Make it yours alone (chown, chmod go-w), or set ATTN_BACKEND_CACHE to a folder that is."
    )
    _warn_once(
        f"{reason}.{advice} Until then compiled kernels are kept in a private folder instead: "
        f"{target.parents[1]}"
    )


def compile_source(name: str, source: str, flags: Sequence[str], path: str, what: str) -> tuple[bytes, str]:
    """Runs nvcc. Returns the cubin, and what the compiler said.

    Raises:
        RuntimeError: the compiler fails; carries its output.
    """
    with cuda_compiler.scratch_file(f"{name}.cubin") as cubin:
        file = cubin.with_suffix(".cu")
        file.write_text(source)
        report = cuda_compiler.run(
            [path, *flags, str(file), "-o", str(cubin)], what, cuda_compiler.TIME_LIMIT
        )
        damage = kernel_cache.damage(cubin.read_bytes()) if cubin.is_file() else "is missing"
        if damage:
            raise RuntimeError(
                f"{path} reported no error on {what}, but its output {damage}: "
                f"{cuda_compiler.ADVICE}\n{report}".rstrip()
            )
        return completed(cubin.read_bytes(), name), report


def completed(cubin: bytes, name: str) -> bytes:
    """The cubin with the addresses of its code (code_address.py)."""
    with cuda_compiler.scratch_file(f"{name}.cubin") as file:
        file.write_bytes(cubin)
        code_address.publish_code_addresses(file)
        return file.read_bytes()


_warned: list[str] = []


def _warn_once(text: str) -> None:
    """Once in a process."""
    if not _warned:
        _warned.append(text)
        logger.warning("attn_backend: %s", text)


def _cached_or_compiled(name: str, arch: str) -> Path:
    path = nvcc()
    if path is None:
        return _cached_by_any_compiler(name, arch) or compile_kernel(name, arch)[0]
    if Settings.read().jit:
        return compile_kernel(name, arch)[0]
    cached = kernel_cache.place(cached_kernel(name, arch, path))[0]
    fault = kernel_cache.fault(cached)
    if fault:
        options = "" if name in kernel_sources(arch) else manifest.compile_options(name)
        raise RuntimeError(
            f"kernel {name} is not compiled, and ATTN_BACKEND_JIT=0 ({fault}): `attn-backend compile --arch "
            f"{arch}{options}` compiles it ahead"
        )
    return cached


@cache
def find_kernel(name: str, arch: str) -> Path:
    """The cubin of a kernel as it goes to the driver, seen to be whole: from the package, from the cache, or
    compiled now.

    Raises:
        RuntimeError: it is nowhere and cannot be compiled.
    """
    return code_address.usable(shipped_or(name, arch, lambda: _cached_or_compiled(name, arch)))


def forget_kernels(error: RuntimeError) -> None:
    """After a failure to load: find_kernel then gives plain cubins, if completed ones may be the reason.

    Otherwise raises the error.
    """
    code_address.do_without(error)
    find_kernel.cache_clear()


def shipped_or(name: str, arch: str, made: Callable[[], Path]) -> Path:
    """The kernel of the package, or else what `made` gives: if it is missing or damaged.

    Raises:
        RuntimeError: `made` does; says so if the kernel of the package is damaged.
    """
    shipped = shipped_kernel(name, arch)
    if not shipped.exists():
        return made()
    fault = shipped_fault(shipped)
    if not fault:
        return shipped
    try:
        return made()
    except RuntimeError as error:
        raise RuntimeError(f"{fault}: reinstall attn-backend; {error}") from error
