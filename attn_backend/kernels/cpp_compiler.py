"""The C++ compiler of this machine, for a variant's kernels on a CPU."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from . import cuda_compiler
from .head_dims import HeadDims

ELEMENTS = {"float32": "float", "float16": "Half", "bfloat16": "BFloat16"}  # by torch's names
_TIME_LIMIT = 600.0
_ADVICE = "install g++, or set CXX to a C++ compiler"

# What csrc/common/cpu/isa.cmake has for the kernels in the package.
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISA_FLAGS = {
    "baseline": [],
    "avx2": _AVX2,
    "avx512": _AVX512,
    "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}
_VECTORS = {"baseline": "Baseline", "avx2": "Avx2", "avx512": "Avx512"}


def compiler() -> list[str] | None:
    """The command of the C++ compiler: CXX, or else the first of the usual names; None if there is none."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        try:
            command = shlex.split(name)
        except ValueError:  # no_compiler() says why
            return None
        path = shutil.which(command[0]) if command else None
        if path:
            return [path, *command[1:]]
    return None


def no_compiler() -> str:
    """Says that there is no compiler, and what to do."""
    wanted = os.environ.get("CXX")
    if not wanted:
        return f"no C++ compiler was found: {_ADVICE}"
    try:
        shlex.split(wanted)
    except ValueError as error:
        return f"CXX is {wanted!r}, which is no command ({error}): {_ADVICE}"
    return f"CXX is {wanted!r}, which is not a program here: {_ADVICE}"


def isa_of(isa: str, dtype: str, head_dim: int | HeadDims) -> str:
    """The instruction set that attention uses where `isa` is in use (csrc/attention/cpu/executor.cpp): AMX
    multiplies bfloat16 only.
    """
    return (
        "avx512"
        if isa == "amx" and (dtype != "bfloat16" or any(dim % 32 for dim in HeadDims.of(head_dim)))
        else isa
    )


def source(isa: str, dtype: str, widens: bool = False) -> str:
    """The text that follows the source of a variant. isa: of isa_of(). widens: over float8 caches."""
    if isa == "amx":
        engine, headers = "attn::cpu::AmxEngine", ["attention/cpu/amx_engine.h"]
    else:
        element = ELEMENTS[dtype] if dtype == "float32" else f"attn::cpu::{ELEMENTS[dtype]}"
        engine, headers = (
            f"attn::cpu::Float32Engine<attn::cpu::{_VECTORS[isa]}, {element}>",
            ["attention/cpu/float32_engine.h", f"common/cpu/vector_{isa}.h"],
        )
    includes = "".join(f'#include "{header}"\n' for header in (*headers, "attention/cpu/variant_kernels.h"))
    variant = "attn::WithScales<attn::UserVariant>" if widens else "attn::UserVariant"
    return f"#define ATTN_VARIANT_ENGINE {engine}\n#define ATTN_VARIANT {variant}\n{includes}"


def flags(isa: str) -> list[str]:
    """The compiler's flags, without the include paths."""
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
    """Compiles a shared library; returns its content, and what the compiler said. digest: headers_digest() of
    `headers`.

    Raises:
        RuntimeError: it does not compile, or what the compiler has written is no shared library for this
            machine; carries the compiler's output.
    """
    # needs pydantic: the checks before an installation import this module without it
    from . import kernel_cache

    with cuda_compiler.scratch_file("variant.so") as library:
        file = library.with_suffix(".cpp")
        file.write_text(text)
        own = [f"-I{headers}", f'-DATTN_HEADERS_DIGEST="{digest}"', str(file), "-o", str(library)]
        said = cuda_compiler.run([*command, *flags(isa), *own], what, _TIME_LIMIT, _ADVICE)
        content = library.read_bytes() if library.is_file() else None
        damage = "is missing" if content is None else kernel_cache.damage(content, for_gpu=False)
        if content is None or damage:
            raise RuntimeError(
                f"{' '.join(command)} reported no error on {what}, but its output {damage}: "
                f"{_ADVICE}\n{said}".rstrip()
            )
        return content, said
