"""Lets the host know where a kernel's machine code lies, so that it can be brought to the L2 cache ahead of its execution (csrc/device/kernel_code.cuh).

A source defines a variable `KernelCode NAME_code{&unknown_code, 0}` for kernel NAME: it has the loader write an address there. Here that becomes the
kernel's, and the kernel's size goes beside it. The source can say neither: the size is not known yet, and what nvcc takes for a kernel's address is a
descriptor for calls (taking it also makes nvcc compile the kernel otherwise).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_SUFFIX = "_code"
_VARIABLES, _RELOCATIONS = ".nv.global.init", ".rela.nv.global.init"
_SYMBOL_BYTES, _RELOCATION_BYTES = 24, 24
_OBJECT = 1  # STT_OBJECT
_ADDRESS = 2  # R_CUDA_64: 64 bits of a symbol's address


class _Section(NamedTuple):
    """Of an ELF64 file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def publish_code_addresses(cubin: Path) -> list[str]:
    """Completes a cubin's variables of type KernelCode; returns the kernels that they belong to. Leaves a fatbin alone."""
    content = bytearray(cubin.read_bytes())
    if content[:4] != b"\x7fELF":
        return []

    def text(table: _Section, at: int) -> str:
        begin = table.offset + at
        return content[begin : content.index(0, begin)].decode()

    (headers,), (count, names) = struct.unpack_from("<Q", content, 0x28), struct.unpack_from("<HH", content, 0x3C)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", content, headers + 64 * i)) for i in range(count)]
    named = {text(sections[names], section.name): section for section in sections}
    if _RELOCATIONS not in named:
        return []
    variables = named[_VARIABLES]
    symbols = named[".symtab"]
    symbol_of: dict[str, int] = {}
    variable_at: dict[int, str] = {}
    for number, at in enumerate(range(symbols.offset, symbols.offset + symbols.size, _SYMBOL_BYTES)):
        name_at, info, _, section, value, _ = struct.unpack_from("<IBBHQQ", content, at)
        name = text(sections[symbols.link], name_at)
        symbol_of[name] = number
        if info & 0xF == _OBJECT and sections[section] is variables:
            variable_at[value] = name
    kernels = []
    relocations = named[_RELOCATIONS]
    for at in range(relocations.offset, relocations.offset + relocations.size, _RELOCATION_BYTES):
        (place,) = struct.unpack_from("<Q", content, at)
        kernel = variable_at[place].removesuffix(_SUFFIX)
        if not variable_at[place].endswith(_SUFFIX) or kernel not in symbol_of:
            continue
        (size,) = struct.unpack_from("<Q", content, symbols.offset + symbol_of[kernel] * _SYMBOL_BYTES + 16)
        struct.pack_into("<Q", content, at + 8, symbol_of[kernel] << 32 | _ADDRESS)
        struct.pack_into("<Q", content, variables.offset + place + 8, size)
        kernels.append(kernel)
    cubin.write_bytes(content)
    return kernels
