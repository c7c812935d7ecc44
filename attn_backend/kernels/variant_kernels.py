"""The kernels of a variant: found in the cache, or compiled when they are needed, for a GPU with nvcc or
NVRTC, for a CPU with a C++ compiler.

An entry's key does not depend on the compiler: what was compiled ahead with one is found where there is
another one, or none.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ..settings import Settings
from . import code_address, cpp_compiler, cubins, cuda_compiler, kernel_cache, manifest, nvrtc, progress
from .archs import ARCHS, BUILDS, SM80
from .head_dims import CPU_HEAD_DIMS_TEXT, CUDA_HEAD_DIMS_TEXT, FLOAT8_Q_TEXT, LATENT_HEAD_DIMS_TEXT, HeadDims
from .headers_digest import headers_digest
from .manifest import VariantSource

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
    arch = cubins.arch_of(capability)
    if arch != SM80:
        return arch
    return (
        PTX_OF_SM80 if Settings.read().arch is not None and capability >= (9, 0) else f"sm_{capability[0]}0"
    )


def arch_of(target: str) -> str:
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
        place = Path(target) / f"{kernel.name}-{cubins.content_key(kernel.source, _nvcc_flags(target))}.cubin"
        return _find(what, place, lambda: _compile_cuda(variant, kernel, target, what), ahead)

    arch = arch_of(target)
    is_shipped = manifest.kernels(arch).get(kernel.name) == kernel  # not another variant of its name
    return code_address.usable(cubins.shipped_or(kernel.name, arch, found) if is_shipped else found())


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
    isa = cpp_compiler.isa_of(isa, dtype, head_dim)
    source = manifest.variant_text(variant) + cpp_compiler.source(isa, dtype, widens)
    what = f"variant {variant.name} ({dtype}, for a CPU with {isa})"
    folder = f"{platform.machine()}_{isa}"
    # The digest, too: the host library takes no other, and covers more headers than the source includes.
    key = cubins.content_key(
        source, [folder, *cpp_compiler.flags(isa), _headers_digest(cubins.source_root())]
    )
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
        cubins.warn_of_private_folder(entry, reason)
        kernel_cache.prepare(entry)
    with kernel_cache.locked(
        entry,
        cuda_compiler.TIME_LIMIT,
        lambda: progress.say(f"waiting for another process, which compiles {what}"),
    ):
        if kernel_cache.fault(entry):
            kernel_cache.store(entry, *compiled())
    return entry


def _nvcc_flags(target: str) -> list[str]:
    """nvcc's flags, without the include paths."""
    number = target.removeprefix("sm_").removeprefix("compute_")
    return [
        *cubins.COMMON_FLAGS,
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
    nvcc = None if wanted == "nvrtc" else cuda_compiler.nvcc()
    includes = f"-I{cubins.source_root()}"
    failure = None
    if nvcc is not None:
        try:
            with progress.shown(f"compiling {what} with nvcc"):
                return cubins.compile_source(
                    kernel.name, kernel.source, [*_nvcc_flags(target), includes], nvcc, what
                )
        except RuntimeError as error:
            explained = _explained(error, variant)
            failure = explained or _without_quotes(error, variant)
            if explained or wanted == "nvcc":
                raise failure from None
    # Without nvcc, or if it fails for another reason than the variant: often its host compiler is missing.
    library = None if wanted == "nvcc" else nvrtc.nvrtc()
    if library is None:
        if failure is not None:
            raise failure
        raise RuntimeError(f"{what} cannot be compiled: {_no_compiler(wanted)}")
    try:
        with progress.shown(f"compiling {what} with NVRTC"):
            content, report = library.compile(kernel.source, [*_nvrtc_flags(target), includes], what)
    except RuntimeError as error:
        raise _explained(error, variant) or _without_quotes(error, variant) from None
    damage = kernel_cache.damage(content)
    if damage:
        raise RuntimeError(
            f"{library} reported no error on {what}, but its output {damage}\n{report}".rstrip()
        )
    return cubins.completed(content, kernel.name), report


def _no_compiler(wanted: str | None) -> str:
    no_nvrtc = f"no NVRTC was found: {nvrtc.ADVICE}"
    if wanted is None:
        return f"{cuda_compiler.no_nvcc()}; and {no_nvrtc}"
    return (
        f"{cuda_compiler.no_nvcc() if wanted == 'nvcc' else no_nvrtc} (ATTN_BACKEND_CUDA_COMPILER is "
        f"{wanted})"
    )


def _compile_cpu(variant: VariantSource, source: str, isa: str, what: str) -> tuple[bytes, str]:
    command = cpp_compiler.compiler()
    if command is None:
        raise RuntimeError(f"{what} cannot be compiled: {cpp_compiler.no_compiler()}")
    root = cubins.source_root()
    try:
        with progress.shown(f"compiling {what} with {Path(command[0]).name}"):
            return cpp_compiler.compile_library(command, source, isa, root, headers_digest(root), what)
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
        f"{cubins.source_root()}/",
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
        arch = arch_of(target)
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
