"""Device kernels as cubins: which exist, where they are found, how one is compiled.

The manifest (manifest.py) lists the kernels and has their sources. A kernel is looked for in the package
(`cubins/<arch>/<name>.cubin`, put there when the wheel was built), then in the cache (kernel_cache.py) under
a key that hashes everything the compiler would read. It is compiled into the cache with nvcc
(compilers.py) when it is in neither, or damaged.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ..settings import Settings
from . import code_address, compilers, kernel_cache, manifest, progress
from .compilers import headers_digest, nvcc, nvcc_version
from .kernel_cache import cache_dir
from .manifest import (
    ARCHS,
    BUILDS,
    CPU_HEAD_DIMS_TEXT,
    CUDA_HEAD_DIMS_TEXT,
    FLOAT8_Q_TEXT,
    LATENT_HEAD_DIMS_TEXT,
    SM80,
    HeadDims,
    VariantSource,
    runnable_archs,
)

logger = logging.getLogger("attn_backend")

# Not from kernels/native.py, which imports tvm-ffi: `make wheel` compiles the kernels without it.
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
        damage = compilers.damage(cubin.read_bytes())
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
            f"kernel {name} for {arch} is neither in the package nor compilable: {compilers.no_nvcc()}"
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
            compilers.NVCC_TIME_LIMIT,
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
    """The cubin with the addresses of its code (code_address.py)."""
    with compilers.scratch_file(f"{name}.cubin") as file:
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


# Code for sm_80 runs on GPUs of compute capability 8 alone. Of its PTX the driver makes code for a newer one,
# as it does of the standard kernels of sm_80.
PTX_OF_SM80 = "compute_80"


def target_of(capability: tuple[int, int]) -> str:
    """What a variant's kernels are compiled for, for a GPU of this compute capability; they run on all of the
    same major version, for an arch with an `a` on this compute capability alone. Where ATTN_BACKEND_ARCH asks
    for sm_80 on a newer GPU, it is PTX_OF_SM80.

    Raises:
        ValueError: older than Ampere, or one that cannot run ATTN_BACKEND_ARCH.
    """
    arch = arch_of(capability)
    if arch != SM80:
        return arch
    return (
        PTX_OF_SM80 if Settings.read().arch is not None and capability >= (9, 0) else f"sm_{capability[0]}0"
    )


def arch_of_target(target: str) -> str:
    """The arch of the standard kernels that stand beside them."""
    return target if target in ARCHS else SM80


def is_target(text: str) -> bool:
    """Whether target_of() may give it: an arch, PTX, or what the GPUs of a major version get that have no
    arch of their own.
    """
    if text in (*ARCHS, PTX_OF_SM80):
        return True
    whole_versions = [f"sm_{arch.capability[0]}0" for arch in BUILDS.values() if not arch.has_siblings]
    return re.fullmatch(r"sm_\d+0", text) is not None and text not in whole_versions


def find_cubin(
    variant: VariantSource, kernel: manifest.Kernel, target: str, ahead: Callable[[], str] | None = None
) -> Path:
    """The cubin of a variant's kernel, seen to be whole: from the package if it ships there, else from the
    cache, or compiled now if it is missing. ahead: for a message, what compiles it ahead of time; None: it
    may be compiled now.

    Raises:
        RuntimeError: it is not there, and cannot be compiled, or must not be.
    """
    what = f"variant {variant.name} ({kernel.name.removesuffix(f'_{variant.name}')} for {target})"

    def found() -> Path:
        place = Path(target) / f"{kernel.name}-{content_key(kernel.source, _nvcc_flags(target))}.cubin"
        return _find(what, place, lambda: _compile_cuda(variant, kernel, target, what), ahead)

    arch = arch_of_target(target)
    is_shipped = manifest.kernels(arch).get(kernel.name) == kernel  # not another variant of its name
    return code_address.usable(shipped_or(kernel.name, arch, found) if is_shipped else found())


def find_library(
    variant: VariantSource,
    isa: str,
    dtype: str,
    head_dim: int | HeadDims,
    widens: bool = False,
    ahead: Callable[[], str] | None = None,
) -> Path:
    """The shared library of a variant's kernels for a CPU, seen to be whole; compiled now if it is missing.

    isa: the one in use (csrc/common/cpu/isa.h). dtype: torch's name. widens: for float8 caches. ahead: as in
    find_cubin().

    Raises:
        RuntimeError: it is not there, and cannot be compiled, or must not be.
    """
    isa = compilers.isa_of(isa, dtype, head_dim)
    source = manifest.variant_text(variant) + compilers.cpp_source(isa, dtype, widens)
    what = f"variant {variant.name} ({dtype}, for a CPU with {isa})"
    folder = f"{platform.machine()}_{isa}"
    # The digest, too: the host library takes no other, and covers more headers than the source includes.
    key = content_key(source, [folder, *compilers.cpp_flags(isa), _headers_digest(source_root())])
    place = Path(folder) / f"attention_cpu_{dtype}{'_float8' if widens else ''}_{variant.name}-{key}.so"
    return _find(what, place, lambda: _compile_cpu(variant, source, isa, what), ahead)


@cache
def _headers_digest(root: Path) -> str:
    return headers_digest(root)


def _find(
    what: str, place: Path, compiled: Callable[[], tuple[bytes, str]], ahead: Callable[[], str] | None
) -> Path:
    """An entry of the cache. place: below its folder. compiled: gives its content, and what the compiler
    said.
    """
    cached = kernel_cache.cache_dir() / place
    entry, reason = kernel_cache.place(cached)
    fault = kernel_cache.fault(entry)
    if not fault:
        return entry
    if ahead is not None:
        raise RuntimeError(f"{what} is not compiled, and ATTN_BACKEND_JIT=0 ({fault}): {ahead()}")
    if not reason:
        try:
            kernel_cache.prepare(entry)
        except RuntimeError as error:  # a folder that can only be read, or a full one
            reason = str(error)
            entry = kernel_cache.private_place(cached, reason)
    if reason:
        warn_of_private_folder(entry, reason)
        kernel_cache.prepare(entry)
    with kernel_cache.locked(
        entry,
        compilers.NVCC_TIME_LIMIT,
        lambda: progress.say(f"waiting for another process, which compiles {what}"),
    ):
        if kernel_cache.fault(entry):
            kernel_cache.store(entry, *compiled())
    return entry


def _nvcc_flags(target: str) -> list[str]:
    """nvcc's flags, without the include paths."""
    number = target.removeprefix("sm_").removeprefix("compute_")
    return [
        *COMMON_FLAGS,
        f"-gencode=arch=compute_{number},code={target}",
        "-fatbin" if target == PTX_OF_SM80 else "-cubin",
    ]


def _nvrtc_flags(target: str) -> list[str]:
    return [
        "-std=c++17",
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
    # Without nvcc, or if it fails for another reason than the variant: often its host compiler is missing.
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
    damage = compilers.damage(content)
    if damage:
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
        raise RuntimeError(f"{what} cannot be compiled: {compilers.no_cpp_compiler()}")
    root = source_root()
    try:
        with progress.shown(f"compiling {what} with {Path(command[0]).name}"):
            return compilers.compile_library(command, source, isa, root, headers_digest(root), what)
    except RuntimeError as error:
        raise _explained(error, variant) or _without_quotes(error, variant) from None


def _explained(error: RuntimeError, variant: VariantSource) -> RuntimeError | None:
    """The compiler's errors in the user's lines, or else in lines made from Python functions; None if there
    are none.
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
    """The error without the compiler's messages about files that are not ours.

    They quote such a file, and a variant can name any: `asm(".include ...")`.
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
        place = _PLACE.match(line)
        if place:
            is_known = place["file"].startswith(known)
            if not is_known:
                kept.append(f"{place['file']}: errors in this file are not shown, since they quote it")
        if is_known or _OUR_END.fullmatch(line):
            kept.append(line)
    return RuntimeError("\n".join(dict.fromkeys(kept)))


def _errors_in(place: str, source: str, said: str) -> Iterator[str]:
    """The errors that a compiler reports for lines of a source, with these lines."""
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
) -> list[Path]:
    """Compiles all kernels of a variant that are missing. targets: of target_of(), or "cpu", for which `isa`
    is. design_name: of manifest.DESIGNS; None: each target's default.

    Raises:
        ValueError: there are no such kernels.
        RuntimeError: one does not compile, or cannot be kept.
    """
    entries = []
    kv_element = manifest.kv_element_of(kv_dtype, dtype)
    if kv_element in manifest.CUDA_ELEMENTS and dtype not in manifest.ELEMENT_NAMES:
        raise ValueError(f"kv_dtype is {kv_dtype}, must be {dtype} or of 8 bits")
    for target in targets:
        if target == "cpu":
            if not HeadDims.of(head_dim).runs_on_cpu:
                raise ValueError(f"head_dim is {head_dim}, must be {CPU_HEAD_DIMS_TEXT} on a CPU")
            if kv_element == "latent" and not HeadDims.of(head_dim).runs_over(kv_element):
                raise ValueError(f"kv_dtype is {kv_dtype}, must be {LATENT_HEAD_DIMS_TEXT}")
            if design_name is not None and {*targets} == {"cpu"}:
                raise ValueError(f"kernel is {design_name}, must be None: a CPU has no choice of kernels")
            of_products = manifest.multiplied_dtype(dtype, kv_element)
            entries.append(
                find_library(variant, isa, of_products, head_dim, kv_element in manifest.CUDA_KV_ELEMENTS)
            )
            continue
        arch = arch_of_target(target)
        if dtype not in manifest.ELEMENT_NAMES or not HeadDims.of(head_dim).runs_on_cuda:
            must_be = (
                f"{', '.join(manifest.ELEMENT_NAMES)} with a head_dim that is {CUDA_HEAD_DIMS_TEXT} on a GPU"
            )
            raise ValueError(f"dtype is {dtype} and head_dim {head_dim}, must be {must_be}")
        if not HeadDims.of(head_dim).runs_over(kv_element):
            raise ValueError(f"kv_dtype is {kv_dtype}, must be {LATENT_HEAD_DIMS_TEXT}")
        if float8_q and not HeadDims.of(head_dim).runs_over(kv_element, float8_q):
            raise ValueError(f"float8_q is given, must not be: q_dtype must be {FLOAT8_Q_TEXT}")
        designs = manifest.designs_for(HeadDims.of(head_dim), variant.has_transforms, arch)
        if design_name is not None and design_name not in designs:
            raise ValueError(
                f"kernel is {design_name}, must be {' or '.join(designs)} for {target}, head_dim {head_dim} "
                f"and variant {variant.name}"
            )
        design = designs[design_name or next(iter(designs))]
        shape = manifest.KernelShape(
            manifest.ELEMENT_NAMES[dtype], HeadDims.of(head_dim), kv_element, float8_q, float8_out
        )
        kernels = manifest.variant_kernels(arch, design, shape, variant, sinks)
        entries += [find_cubin(variant, kernel, target) for kernel in kernels.values()]
    return entries
