"""Compiled kernels: which ones exist, where they are found, and how they are compiled. On a GPU a kernel is a
cubin; a variant's kernel for the CPU is a shared library.

The manifest (manifest.py) lists the kernels and generates their sources. A kernel is first looked up in the
package (`cubins/<arch>/<name>.cubin`, added when the wheel was built). The second place is the cache
(kernel_cache.py), under a key that hashes everything the compiler would read. If it is missing or damaged in
both, a compiler writes it to the cache (compilers.py): nvcc or NVRTC, for a CPU a C++ compiler.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ..settings import Settings
from ..stored_formats import BY_DTYPE, BY_ELEMENT
from . import code_address, compilers, kernel_cache, manifest, progress
from .compilers import headers_digest, nvcc, nvcc_version
from .kernel_cache import cache_dir
from .manifest import (
    ARCHS,
    BUILDS,
    SM80,
    HeadDims,
    VariantSource,
    runnable_archs,
)

# Here and not in kernels/native.py, which needs tvm-ffi: `make wheel` compiles the kernels without it.
PACKAGE = Path(__file__).resolve().parent.parent
# Where this process found each kernel: "shipped" in the package, "cached", or "compiled" now.
origins: dict[Path, str] = {}
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"', re.MULTILINE)


class NoCompilerError(RuntimeError):
    """There is no C++ compiler for a variant's kernels on a CPU."""


def source_root() -> Path:
    """The folder csrc/: next to the package in a checkout, inside it when installed."""
    inside = PACKAGE / "csrc"
    return inside if inside.is_dir() else PACKAGE.parent / "csrc"


def kernel_sources(arch: str) -> dict[str, str]:
    """Name and source of every kernel that is built ahead of time."""
    return {name: kernel.source for name, kernel in manifest.kernels(arch).items()}


def _source_or_raise(name: str, arch: str) -> str:
    """The source of a kernel that is built ahead of time, or of a kernel for another head_dim.

    Raises:
        ValueError: there is no kernel of that name.
    """
    sources = kernel_sources(arch)
    source = sources[name] if name in sources else manifest.source_of(name, arch)
    if source is None:
        raise ValueError(f"kernel is {name!r}, must be one of {', '.join(sources)}, or of another head_dim")
    return source


def arch_of(capability: tuple[int, int]) -> str:
    """The arch whose build runs on a GPU of this compute capability: ATTN_BACKEND_ARCH, or the arch made for
    it.

    Raises:
        ValueError: the GPU is older than Ampere, or cannot run ATTN_BACKEND_ARCH.
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


def arch_flags(arch: str) -> list[str]:
    """Compiler flags of an arch. sm_80 includes PTX, so that every newer GPU can run it."""
    return [*COMMON_FLAGS, f"-I{source_root()}", *BUILDS[arch].flags]


def _include(source: str, root: Path, files: dict[str, str]) -> None:
    """Adds the text of every file of csrc/ that a source includes, directly or indirectly, to `files`. Keys
    are paths in csrc/.
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
    """Two hashes: one of the source, its includes, the flags and the arch; one of the compiler."""
    return f"{_source_key(source, arch)}-{hashlib.sha256(nvcc_version(compiler).encode()).hexdigest()[:8]}"


def _source_key(source: str, arch: str) -> str:
    return content_key(source, [arch, *(flag for flag in arch_flags(arch) if not flag.startswith("-I"))])


def content_key(source: str, how: Sequence[str]) -> str:
    """Hash of a source, its includes, and everything else that affects the compiled code."""
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
    return cache_dir() / arch / f"{name}-{cache_key(_source_or_raise(name, arch), arch, compiler)}.cubin"


def _cached_by_any_compiler(name: str, arch: str) -> Path | None:
    """An undamaged cached kernel of the current source, compiled by any nvcc, perhaps on another machine."""
    pattern = f"{name}-{_source_key(_source_or_raise(name, arch), arch)}-*.cubin"
    folder = kernel_cache.place(cache_dir() / arch / pattern)[0].parent
    return next((entry for entry in sorted(folder.glob(pattern)) if not kernel_cache.fault(entry)), None)


def shipped_kernel(name: str, arch: str) -> Path:
    """The path of a kernel in the package, which may be missing or damaged."""
    return PACKAGE / "cubins" / arch / f"{name}.cubin"


def shipped_fault(cubin: Path) -> str:
    """Why a cubin of the package cannot be used; "" if it can.

    Only checks that it is complete: the installer has compared it with the wheel.
    """
    try:
        damage = compilers.damage(cubin.read_bytes())
    except OSError as error:
        return f"{cubin} cannot be read: {error.strerror}"
    return f"{cubin} {damage}" if damage else ""


def compile_kernel(name: str, arch: str, ahead: Callable[[], str] | None = None) -> tuple[Path, str]:
    """Compiles a kernel into the cache, unless it is already there and undamaged.

    Args:
        ahead: as in find_variant_kernel().

    Returns the file and the compiler's resource report.

    Raises:
        ValueError: there is no kernel of that name.
        RuntimeError: there is no compiler, or it failed (the message has its output), or the result cannot
            be saved, or compiling is switched off.
    """
    source = _source_or_raise(name, arch)
    path = nvcc()
    what = f"kernel {name} for {arch}"
    if path is None:
        raise RuntimeError(f"{what} is neither in the package nor compilable: {compilers.no_nvcc()}")
    entry = _entry(
        what,
        cached_kernel(name, arch, path),
        lambda: compile_source(name, source, arch_flags(arch), path, what),
        ahead,
    )
    return entry, kernel_cache.report(entry)


def _entry(
    what: str,
    cached: Path,
    make: Callable[[], tuple[bytes, str]],
    ahead: Callable[[], str] | None,
    *,
    or_private: bool = False,
) -> Path:
    """An entry of the cache, made now if it is missing or damaged.

    Args:
        cached: its path in the cache.
        make: returns the entry's content and the compiler's output.
        ahead: as in find_variant_kernel().
        or_private: if the cache cannot be written, keep the entry in a private folder instead of raising.

    Raises:
        RuntimeError: the entry must not be made, or it cannot be made or saved.
    """
    entry, reason = kernel_cache.place(cached)
    if reason:
        _warn_of_private_folder(entry, reason)
    fault = kernel_cache.fault(entry)
    if not fault:
        origins.setdefault(entry, "cached")
        return entry
    if ahead is not None:
        raise RuntimeError(f"{what} is not compiled, and ATTN_BACKEND_JIT=0 ({fault}): {ahead()}")
    try:
        kernel_cache.prepare(entry)
    except RuntimeError as error:  # the folder is read-only or full
        if reason or not or_private:
            raise
        entry = kernel_cache.private_place(cached, str(error))
        _warn_of_private_folder(entry, str(error))
        kernel_cache.prepare(entry)
    with kernel_cache.locked(
        entry,
        compilers.NVCC_TIME_LIMIT,
        lambda: progress.say(f"waiting for another process, which compiles {what}"),
    ):
        if kernel_cache.fault(entry):
            kernel_cache.store(entry, *make())
            origins[entry] = "compiled"
    origins.setdefault(entry, "cached")
    return entry


def _warn_of_private_folder(target: Path, reason: str) -> None:
    """Warns, once per process, that an entry is not kept in the cache."""
    advice = (
        ""
        if "ATTN_BACKEND_CACHE" in reason
        else " Make yourself the only writer (chown, chmod go-w), or set ATTN_BACKEND_CACHE to such a folder."
    )
    progress.warn_once(
        f"attn_backend: {reason}.{advice} Until then compiled kernels are kept in a private folder instead: "
        f"{target.parents[1]}"
    )


def compile_source(name: str, source: str, flags: Sequence[str], path: str, what: str) -> tuple[bytes, str]:
    """Runs nvcc. Returns the cubin and the compiler's output.

    Raises:
        RuntimeError: compilation failed; the message has the compiler's output.
    """
    with compilers.scratch_file(f"{name}.cubin") as cubin:
        file = cubin.with_suffix(".cu")
        file.write_text(source)
        report = compilers.run_compiler(
            [path, *flags, str(file), "-o", str(cubin)], what, compilers.NVCC_TIME_LIMIT
        )
        damage = compilers.damage(cubin.read_bytes()) if cubin.is_file() else "is missing"
        if damage:
            raise RuntimeError(
                f"{path} reported no error on {what}, but its output {damage}: "
                f"{compilers.NVCC_ADVICE}\n{report}".rstrip()
            )
        return completed(cubin.read_bytes(), name), report


def completed(cubin: bytes, name: str) -> bytes:
    """The cubin, with its code addresses filled in (code_address.py)."""
    with compilers.scratch_file(f"{name}.cubin") as file:
        file.write_bytes(cubin)
        code_address.publish_code_addresses(file)
        return file.read_bytes()


def _cached_or_compiled(name: str, arch: str) -> Path:
    def ahead() -> str:
        options = "" if name in kernel_sources(arch) else manifest.compile_options(name)
        return f"`attn-backend compile --arch {arch}{options}` compiles it ahead"

    found = _cached_by_any_compiler(name, arch) if nvcc() is None else None
    if found is not None:
        origins[found] = "cached"
    return found or compile_kernel(name, arch, None if Settings.read().jit else ahead)[0]


@cache
def find_kernel(name: str, arch: str) -> Path:
    """The cubin of a kernel, ready for the driver and checked to be complete: from the package, from the
    cache, or compiled now.

    Raises:
        RuntimeError: it was not found and cannot be compiled.
    """
    return code_address.usable(shipped_or(name, arch, lambda: _cached_or_compiled(name, arch)))


def use_plain_kernels_or_raise(error: RuntimeError) -> None:
    """Called after a cubin failed to load: find_kernel returns plain cubins from now on, without addresses
    of their code.

    Raises:
        RuntimeError: the error itself, if addresses cannot be the reason.
    """
    code_address.do_without(error)
    find_kernel.cache_clear()


def shipped_or(name: str, arch: str, made: Callable[[], Path]) -> Path:
    """The kernel of the package, or the result of `made` if that kernel is missing or damaged.

    Raises:
        RuntimeError: `made` failed; the message mentions a damaged kernel of the package.
    """
    shipped = shipped_kernel(name, arch)
    if not shipped.exists():
        return made()
    fault = shipped_fault(shipped)
    if not fault:
        origins[shipped] = "shipped"
        return shipped
    try:
        return made()
    except RuntimeError as error:
        raise RuntimeError(f"{fault}: reinstall attn-backend; {error}") from error


# Code for sm_80 runs only on GPUs of compute capability 8. The driver compiles its PTX for newer GPUs, as it
# does for the standard sm_80 kernels.
PTX_OF_SM80 = "compute_80"


def target_of(capability: tuple[int, int]) -> str:
    """The target that a variant's kernels are compiled for, on a GPU of this compute capability. They run on
    all GPUs of the same major version; with an arch ending in `a`, only on this compute capability. If
    ATTN_BACKEND_ARCH selects sm_80 on a newer GPU, the target is PTX_OF_SM80.

    Raises:
        ValueError: the GPU is older than Ampere, or cannot run ATTN_BACKEND_ARCH.
    """
    arch = arch_of(capability)
    if arch != SM80:
        return arch
    return (
        PTX_OF_SM80 if Settings.read().arch is not None and capability >= (9, 0) else f"sm_{capability[0]}0"
    )


def arch_of_target(target: str) -> str:
    """The arch of the standard kernels that are used together with this target."""
    return target if target in ARCHS else SM80


def is_target(text: str) -> bool:
    """Whether target_of() may return it: an arch, PTX, or the target of a major version whose GPUs have no
    arch in the manifest.
    """
    if text in (*ARCHS, PTX_OF_SM80):
        return True
    whole_versions = [f"sm_{arch.capability[0]}0" for arch in BUILDS.values() if not arch.has_siblings]
    return re.fullmatch(r"sm_\d+0", text) is not None and text not in whole_versions


def find_variant_kernel(
    variant: VariantSource, kernel: manifest.Kernel, target: str, ahead: Callable[[], str] | None = None
) -> Path:
    """The cubin of a variant's kernel, checked to be complete: from the package if it ships there, else from
    the cache, or compiled now. ahead: returns the command that compiles it ahead of time, for a message;
    None: it may be compiled now.

    Raises:
        RuntimeError: it is missing and cannot be compiled, or must not be.
    """
    what = f"variant {variant.name} ({kernel.name.removesuffix(f'_{variant.name}')} for {target})"

    def found() -> Path:
        key = content_key(kernel.source, _nvcc_flags(target))
        cached = kernel_cache.cache_dir() / target / f"{kernel.name}-{key}.cubin"
        return _entry(
            what, cached, lambda: _compile_cuda(variant, kernel, target, what), ahead, or_private=True
        )

    arch = arch_of_target(target)
    is_shipped = manifest.kernels(arch).get(kernel.name) == kernel  # not another variant with its name
    return code_address.usable(shipped_or(kernel.name, arch, found) if is_shipped else found())


def find_library(
    variant: VariantSource,
    isa: str,
    dtype: str,
    head_dim: int | HeadDims,
    kv_element: str | None = None,
    ahead: Callable[[], str] | None = None,
) -> Path:
    """The shared library of a variant's kernels for a CPU, checked to be complete; compiled now if missing.

    isa: the selected one (csrc/common/cpu/isa.h). dtype: of Q, by torch's name. kv_element: of a cache of
    another type, from manifest.kv_element_of(). ahead: as in find_variant_kernel().

    Raises:
        NoCompilerError: it is missing, and there is no compiler.
        RuntimeError: it is missing and cannot be compiled, or must not be.
    """
    # One library dequantizes all caches with scales to Q's dtype (its name has float8). Q is converted to the
    # dtype of another cache.
    widens = kv_element in manifest.SCALED_ELEMENTS
    dtype = dtype if kv_element is None or widens else BY_ELEMENT[kv_element].dtype
    isa = compilers.isa_of(isa, dtype, head_dim)
    source = manifest.variant_text(variant) + compilers.cpp_source(isa, dtype, widens)
    what = f"variant {variant.name} ({dtype}, for a CPU with {isa})"
    folder = f"{platform.machine()}_{isa}"
    # Hash the digest, too: the host library requires a match, and it covers headers the source does not use.
    key = content_key(source, [folder, *compilers.cpp_flags(isa), headers_digest(source_root())])
    name = f"attention_cpu_{dtype}{'_float8' if widens else ''}_{variant.name}-{key}.so"
    return _entry(
        what,
        kernel_cache.cache_dir() / folder / name,
        lambda: _compile_cpu(variant, source, isa, what),
        ahead,
        or_private=True,
    )


def _nvcc_flags(target: str) -> list[str]:
    number = target.removeprefix("sm_").removeprefix("compute_")
    return [
        *COMMON_FLAGS,
        f"-gencode=arch=compute_{number},code={target}",
        "-fatbin" if target == PTX_OF_SM80 else "-cubin",
    ]


def _nvrtc_flags(target: str) -> list[str]:
    return [
        "-std=c++20",  # for designated initializers, which nvcc and g++ also take in C++17
        f"--gpu-architecture={target}",
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    ]


def _compile_cuda(
    variant: VariantSource, kernel: manifest.Kernel, target: str, what: str
) -> tuple[bytes, str]:
    wanted = Settings.read().cuda_compiler
    nvcc = None if wanted == "nvrtc" else compilers.nvcc()
    includes = f"-I{source_root()}"
    failure = None
    if nvcc is not None:
        try:
            with progress.shown(f"compiling {what} with nvcc"):
                return compile_source(
                    kernel.name, kernel.source, [*_nvcc_flags(target), includes], nvcc, what
                )
        except RuntimeError as error:
            explained = _explained(error, variant)
            failure = explained or _without_quotes(error, variant)
            if explained or wanted == "nvcc":
                raise failure from None
    # Without nvcc, or if nvcc fails for reasons other than the variant: often its host compiler is missing.
    library = None if wanted == "nvcc" else compilers.nvrtc()
    if library is None:
        if failure is not None:
            raise failure
        raise RuntimeError(f"{what} cannot be compiled: {_no_compiler(wanted)}")
    try:
        with progress.shown(f"compiling {what} with NVRTC"):
            content, report = library.compile(kernel.source, [*_nvrtc_flags(target), includes], what)
    except RuntimeError as error:
        raise _explained(error, variant) or _without_quotes(error, variant) from None
    if damage := compilers.damage(content):
        raise RuntimeError(
            f"{library} reported no error on {what}, but its output {damage}\n{report}".rstrip()
        )
    return completed(content, kernel.name), report


def _no_compiler(wanted: str | None) -> str:
    no_nvrtc = f"no NVRTC was found: {compilers.NVRTC_ADVICE}"
    if wanted is None:
        return f"{compilers.no_nvcc()}; and {no_nvrtc}"
    return f"{compilers.no_nvcc() if wanted == 'nvcc' else no_nvrtc} (ATTN_BACKEND_CUDA_COMPILER is {wanted})"


def _compile_cpu(variant: VariantSource, source: str, isa: str, what: str) -> tuple[bytes, str]:
    command = compilers.cpp_compiler()
    if command is None:
        raise NoCompilerError(f"{what} cannot be compiled: {compilers.no_cpp_compiler()}")
    root = source_root()
    try:
        with progress.shown(f"compiling {what} with {Path(command[0]).name}"):
            return compilers.compile_library(command, source, isa, root, headers_digest(root), what)
    except RuntimeError as error:
        raise _explained(error, variant) or _without_quotes(error, variant) from None


def _explained(error: RuntimeError, variant: VariantSource) -> RuntimeError | None:
    """The compiler's errors in the user's lines, or else in lines generated from Python functions; None if
    there are none.
    """
    for sources in (variant.user_sources, {manifest.variant_place(variant.name): variant.source}):
        found = [
            message for place, source in sources.items() for message in _errors_in(place, source, str(error))
        ]
        if found:
            return RuntimeError(
                "\n".join((f"variant {variant.name} does not compile:", *dict.fromkeys(found)))
            )
    return None


# FILE:LINE: or FILE(LINE): before a message
_PLACE = re.compile(r"(?!In file included from )(?P<file>[^\s:(][^:(]*)(?:\(\d+\)|:\d+(?::\d+)?) ?:")
_OUR_END = re.compile(r".* ended with exit status \d+|NVRTC .*")


def _without_quotes(error: RuntimeError, variant: VariantSource) -> RuntimeError:
    """The error, without the compiler's messages about files outside this project.

    Such messages quote the file, and a variant can name any file: `asm(".include ...")`.
    """
    known = (
        f"{source_root()}/",
        *variant.user_sources,
        manifest.variant_place(variant.name),
        "attn_backend",
        "<generated for variant ",
        "kernel.cu",
    )
    kept, is_known = [], True
    for line in str(error).split("\n"):
        if place := _PLACE.match(line):
            is_known = place["file"].startswith(known)
            if not is_known:
                kept.append(f"{place['file']}: errors in this file are not shown, since they quote it")
        if is_known or _OUR_END.fullmatch(line):
            kept.append(line)
    return RuntimeError("\n".join(dict.fromkeys(kept)))


def _errors_in(place: str, source: str, said: str) -> Iterator[str]:
    """The errors that a compiler reports for lines of a source, together with these lines."""
    lines = source.split("\n")
    # nvcc and NVRTC: FILE(LINE): error: TEXT; g++ and clang++: FILE:LINE:COLUMN: error: TEXT.
    for match in re.finditer(
        rf"^{re.escape(place)}(?:\((\d+)\)|:(\d+)(?::\d+)?): *(.*\berror\b.*)$", said, re.MULTILINE
    ):
        number = int(match[1] or match[2])
        yield (
            f"{place}:{number}: {match[3]}\n{number:6} | "
            f"{lines[number - 1] if 0 < number <= len(lines) else ''}"
        )


def compile_ahead(
    variant: VariantSource,
    targets: Sequence[str],
    design_name: str | None,
    dtype: str,
    head_dim: int | HeadDims,
    isa: str,
    sinks: bool = False,
    kv_dtype: str | None = None,
    float8_q: bool = False,
    float8_out: bool = False,
    token_scales: bool = False,
    rotation: bool = False,
) -> list[Path]:
    """Compiles all missing kernels of a variant. targets: from target_of(), or "cpu", which uses `isa`.
    design_name: a key of manifest.DESIGNS; None: each target's default.

    Raises:
        ValueError: the design does not serve these heads with this variant.
        RuntimeError: a kernel does not compile, or cannot be saved.
    """
    entries = []
    kv_element = manifest.kv_element_of(kv_dtype, dtype, token_scales)
    for target in targets:
        if target == "cpu":
            entries.append(find_library(variant, isa, dtype, head_dim, kv_element))
            continue
        arch = arch_of_target(target)
        designs = manifest.designs_for(HeadDims.of(head_dim), variant.has_transforms, arch)
        if design_name is not None and design_name not in designs:
            raise ValueError(
                f"kernel is {design_name}, must be {' or '.join(designs)} for {target}, head_dim {head_dim} "
                f"and variant {variant.name}"
            )
        design = designs[design_name or next(iter(designs))]
        shape = manifest.KernelShape(
            BY_DTYPE[dtype, False].element, HeadDims.of(head_dim), kv_element, float8_q, float8_out, rotation
        )
        kernels = manifest.variant_kernels(arch, design, shape, variant, sinks)
        entries += [find_variant_kernel(variant, kernel, target) for kernel in kernels.values()]
    return entries
