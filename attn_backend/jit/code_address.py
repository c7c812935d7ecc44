"""Publishes the address of a kernel's machine code, so that the kernel can prefetch it to the L2 cache
(csrc/common/kernel_code.cuh).

The source of kernel NAME defines a variable `KernelCode NAME_code{&unknown_code, 0}`, into which the loader
writes an address. This module changes the relocation to the kernel's address, and fills in the kernel's size.
The source can do neither. It does not know the size, and nvcc turns a kernel's address into an index of a
call table (taking the address also changes the code that nvcc generates).

Kernels also run without it, but slower, so failure is non-fatal. A cubin with unexpected contents is left
unchanged. If the driver rejects a completed cubin, or ATTN_BACKEND_PREFETCH_CODE is 0, plain copies replace
the completed ones.
"""

from __future__ import annotations

import io
import os
import struct
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ..settings import Settings
from . import progress


class RejectedKernelError(RuntimeError):
    """The driver refuses to load a cubin."""


_SUFFIX = "_code"
_NO_CODE = "_ZN4attn12unknown_codeE"  # attn::unknown_code
_VARIABLES = ".nv.global.init"
_KERNEL_CODE_BYTES = 16
_RELOCATION_BYTES = 24
# R_CUDA_64, R_CUDA_G64: a symbol's 64-bit address, specific or generic; nvcc emits the generic one
_ADDRESS, GENERIC_ADDRESS = 2, 4


class _Variable(NamedTuple):
    """The KernelCode variable of a kernel."""

    kernel: str
    relocation: int  # file offset of the relocation that sets its address
    size: int  # file offset of its size field
    symbol: int  # index of the kernel's symbol
    code_bytes: int
    no_code: int  # index of the symbol attn::unknown_code


def address_variables(content: bytes) -> list[_Variable]:
    """The variables in a cubin. Empty for fatbins, and for cubins without such variables."""
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
        # as nvcc writes it, and as completed here
        expected = {(no_code, GENERIC_ADDRESS), (kernels[kernel][0], _ADDRESS)}
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


def with_address(content: bytes, variables: list[_Variable], complete: bool) -> bytes:
    result = bytearray(content)
    for variable in variables:
        symbol, kind, size = (
            (variable.symbol, _ADDRESS, variable.code_bytes)
            if complete
            else (variable.no_code, GENERIC_ADDRESS, 0)
        )
        struct.pack_into("<Qq", result, variable.relocation + 8, symbol << 32 | kind, 0)
        struct.pack_into("<Q", result, variable.size, size)
    return bytes(result)


def publish_code_addresses(cubin: Path) -> list[str]:
    """Completes a cubin's KernelCode variables; returns the names of their kernels.

    If it cannot parse the cubin, it warns and leaves the file unchanged.
    """
    content = cubin.read_bytes()
    try:
        variables = address_variables(content)
        completed = with_address(content, variables, complete=True)
    except Exception as error:  # pyelftools raises many types, or is missing; kernels run anyway
        _warn_of_slower_kernels(
            f"compiled kernels do not say where their code lies ({type(error).__name__}: {error})"
        )
        return []
    if variables:
        cubin.write_bytes(completed)
    return [variable.kernel for variable in variables]


def has_pyelftools() -> bool:
    """Whether newly compiled cubins can be completed."""
    from importlib.util import find_spec

    return find_spec("elftools") is not None


def recipe() -> bytes:
    """The bytes that determine how cubins are completed, as part of a cached kernel's key."""
    return Path(__file__).read_bytes() + (b"" if has_pyelftools() else b"without pyelftools")


rejected: list[str] = []  # the driver's message


def usable(cubin: Path) -> Path:
    """The cubin, or a plain copy if it is completed and completed ones must not be used.

    Only this process can open the copy.

    Raises:
        RuntimeError: a plain copy cannot be made.
    """
    if Settings.read().prefetch_code and not rejected:
        return cubin
    content = cubin.read_bytes()
    try:
        plain = with_address(content, address_variables(content), complete=False)
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
    """An in-memory file of this process, which disappears however the process ends."""
    handle = os.memfd_create(name)
    with open(handle, "wb", closefd=False) as file:
        file.write(content)
    return Path(f"/proc/self/fd/{handle}")


def do_without(error: RuntimeError) -> None:
    """Handles the driver's error for a cubin that it did not load: from now on `usable` gives plain copies.

    Raises:
        RuntimeError: the same error, if completed cubins were not in use or it is not about loading.
    """
    if rejected or not Settings.read().prefetch_code or not isinstance(error, RejectedKernelError):
        raise error
    rejected.append(str(error))
    _warn_of_slower_kernels(
        f"kernels are used without addresses of their code, since the driver rejects them ({error})"
    )


def _warn_of_slower_kernels(text: str) -> None:
    progress.warn_once(f"attn_backend: {text}. Attention is slower by a few percent.")
