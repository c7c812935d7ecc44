"""Tells the host where a kernel's machine code lies, so that it can be brought to the L2 cache ahead of its
execution (csrc/common/kernel_code.cuh).

A source defines a variable `KernelCode NAME_code{&unknown_code, 0}` for kernel NAME, which has the loader
write an address there. Here that address becomes the kernel's, and the kernel's size goes beside it. The
source cannot do either: it does not know the size, and what nvcc takes for a kernel's address is an index of
a table for calls (taking it also makes nvcc compile the kernel differently).

Kernels run without it, only slower. So it fails soft: a cubin that does not look as expected stays as nvcc
made it, and where the driver rejects a completed one, or ATTN_BACKEND_PREFETCH_CODE is 0, plain copies take
its place.
"""

from __future__ import annotations

import io
import logging
import os
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..settings import Settings


class RejectedKernelError(RuntimeError):
    """The driver does not load a cubin."""


logger = logging.getLogger("attn_backend")

_SUFFIX = "_code"
_NO_CODE = "_ZN4attn12unknown_codeE"  # attn::unknown_code
_VARIABLES = ".nv.global.init"
_KERNEL_CODE_BYTES = 16
_RELOCATION_BYTES = 24
# R_CUDA_64, R_CUDA_G64: 64 bits of a symbol's address, also as a generic one, which nvcc writes
_ADDRESS, _GENERIC_ADDRESS = 2, 4


class _Variable(NamedTuple):
    """A KernelCode of a kernel."""

    kernel: str
    relocation: int  # offset in the file of what says whose address is written there
    size: int  # offset in the file of the number of bytes
    symbol: int  # number of the kernel's symbol
    code_bytes: int
    no_code: int  # number of the symbol of attn::unknown_code


def _variables(content: bytes) -> list[_Variable]:
    """Empty for a fatbin, and for a cubin without such variables."""
    if content[:4] != b"\x7fELF":
        return []
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(content))
    relocations, section = elf.get_section_by_name(f".rela{_VARIABLES}"), elf.get_section_by_name(_VARIABLES)
    if relocations is None:
        return []
    section_number = elf.get_section_index(_VARIABLES)
    kernels, name_at, no_code = {}, {}, 0
    for number, symbol in enumerate(elf.get_section_by_name(".symtab").iter_symbols()):
        kind, size = symbol["st_info"]["type"], symbol["st_size"]
        if kind == "STT_FUNC":
            kernels[symbol.name] = number, size
        elif symbol.name == _NO_CODE:
            no_code = number
        elif (
            kind == "STT_OBJECT"
            and size == _KERNEL_CODE_BYTES
            and symbol["st_shndx"] == section_number
            and symbol.name.endswith(_SUFFIX)
        ):
            name_at[symbol["st_value"]] = symbol.name.removesuffix(_SUFFIX)
    found = []
    for i, relocation in enumerate(relocations.iter_relocations()):
        place = relocation["r_offset"]
        kernel = name_at.get(place, "")
        if kernel not in kernels:
            continue
        # as nvcc makes it, and completed
        expected = {(no_code, _GENERIC_ADDRESS), (kernels[kernel][0], _ADDRESS)}
        if (
            not no_code
            or relocation["r_addend"] != 0
            or (relocation["r_info_sym"], relocation["r_info_type"]) not in expected
        ):
            raise ValueError(f"{kernel}{_SUFFIX} is not relocated to {_NO_CODE}")
        found.append(
            _Variable(
                kernel,
                relocations["sh_offset"] + i * _RELOCATION_BYTES,
                section["sh_offset"] + place + 8,
                *kernels[kernel],
                no_code,
            )
        )
    return found


def _written(content: bytes, variables: list[_Variable], complete: bool) -> bytes:
    result = bytearray(content)
    for variable in variables:
        symbol, kind, size = (
            (variable.symbol, _ADDRESS, variable.code_bytes)
            if complete
            else (variable.no_code, _GENERIC_ADDRESS, 0)
        )
        struct.pack_into("<Qq", result, variable.relocation + 8, symbol << 32 | kind, 0)
        struct.pack_into("<Q", result, variable.size, size)
    return bytes(result)


def publish_code_addresses(cubin: Path) -> list[str]:
    """Completes a cubin's variables of type KernelCode; returns the kernels that they belong to.

    Warns and leaves alone what it cannot read.
    """
    content = cubin.read_bytes()
    try:
        variables = _variables(content)
        completed = _written(content, variables, complete=True)
    except Exception as error:  # pyelftools raises many types, or is missing: kernels run without it
        _warn(f"compiled kernels do not say where their code lies ({type(error).__name__}: {error})")
        return []
    if variables:
        cubin.write_bytes(completed)
    return [variable.kernel for variable in variables]


def has_pyelftools() -> bool:
    """Whether cubins that are compiled now can be completed."""
    from importlib.util import find_spec

    return find_spec("elftools") is not None


def recipe() -> bytes:
    """The bytes that decide how cubins are completed: a part of the key of a cached kernel."""
    return Path(__file__).read_bytes() + (b"" if has_pyelftools() else b"without pyelftools")


_rejected: list[str] = []  # the driver's message


def usable(cubin: Path) -> Path:
    """The cubin, or a plain copy of a completed one where completed ones are not to be used.

    Only this process can open the copy.

    Raises:
        RuntimeError: a plain copy cannot be made.
    """
    if Settings.read().prefetch_code and not _rejected:
        return cubin
    content = cubin.read_bytes()
    try:
        plain = _written(content, _variables(content), complete=False)
    except Exception as error:
        raise RuntimeError(
            f"{cubin} cannot be used without addresses of code ({type(error).__name__}: {error}); it needs "
            f"pyelftools"
        ) from error
    if plain == content:
        return cubin
    return _in_memory(cubin.name, plain)


@cache
def _in_memory(name: str, content: bytes) -> Path:
    """A file of this process that is on no disk: nothing of it stays, however the process ends."""
    handle = os.memfd_create(name)
    with open(handle, "wb", closefd=False) as file:
        file.write(content)
    return Path(f"/proc/self/fd/{handle}")


def do_without(error: RuntimeError) -> None:
    """Called with what the driver said of a cubin that it did not load: from now on `usable` gives plain
    copies.

    Raises:
        RuntimeError: the same error, where completed cubins were not in use or it is not about loading.
    """
    if _rejected or not Settings.read().prefetch_code or not isinstance(error, RejectedKernelError):
        raise error
    _rejected.append(str(error))
    _warn(f"kernels are used without addresses of their code, since the driver rejects them ({error})")


@cache
def _warn(text: str) -> None:
    """Once in a process."""
    logger.warning("attn_backend: %s. Attention is slower by a few percent.", text)
