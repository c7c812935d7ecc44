"""Lets the host know where a kernel's machine code lies, so that it can be brought to the L2 cache ahead of its execution (csrc/common/kernel_code.cuh).

A source defines a variable `KernelCode NAME_code{&unknown_code, 0}` for kernel NAME: it has the loader write an address there. Here that becomes the
kernel's, and the kernel's size goes beside it. The source can say neither: the size is not known yet, and what nvcc takes for a kernel's address is an
index of a table for calls (taking it also makes nvcc compile the kernel otherwise).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_SUFFIX = "_code"
_VARIABLES, _RELOCATIONS = ".nv.global.init", ".rela.nv.global.init"
_SYMBOL_BYTES, _RELOCATION_BYTES = 24, 24
_OBJECT, _FUNCTION = 1, 2  # STT_OBJECT, STT_FUNC
_KERNEL_CODE_BYTES = 16
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
    variables, symbols = named[_VARIABLES], named[".symtab"]
    kernels: dict[str, tuple[int, int]] = {}  # number of the symbol, bytes
    variable_at: dict[int, str] = {}
    for number, at in enumerate(range(symbols.offset, symbols.offset + symbols.size, _SYMBOL_BYTES)):
        name_at, info, _, section, value, size = struct.unpack_from("<IBBHQQ", content, at)
        name = text(sections[symbols.link], name_at)
        if info & 0xF == _FUNCTION:
            kernels[name] = number, size
        elif info & 0xF == _OBJECT and size == _KERNEL_CODE_BYTES and section < count and sections[section] is variables and name.endswith(_SUFFIX):
            variable_at[value] = name
    published = []
    relocations = named[_RELOCATIONS]
    for at in range(relocations.offset, relocations.offset + relocations.size, _RELOCATION_BYTES):
        (place,) = struct.unpack_from("<Q", content, at)
        kernel = variable_at.get(place, "").removesuffix(_SUFFIX)
        if kernel not in kernels:
            continue
        number, size = kernels[kernel]
        struct.pack_into("<Qq", content, at + 8, number << 32 | _ADDRESS, 0)
        struct.pack_into("<Q", content, variables.offset + place + 8, size)
        published.append(kernel)
    cubin.write_bytes(content)
    return published
