"""The host library: C++ behind tvm-ffi, without a torch ABI. Provides its functions, structs and errors, and
its values for dtypes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
import tvm_ffi

from ..jit.code_address import RejectedKernelError
from ..jit.cubins import PACKAGE, arch_of, find_kernel
from ..metadata.kv_cache import FORMATS_BY_DTYPE, CacheDtype

CUDA_DTYPES = (torch.bfloat16, torch.float16)  # of Q and O, except 8-bit ones
CPU_DTYPES = (*CUDA_DTYPES, torch.float32)  # and of states and logits, everywhere


@cache
def float_element(dtype: torch.dtype) -> str:
    """The element of states or logits, in names of kernels. Other dtypes are refused before the kernel is
    used; they have float32's.
    """
    return FORMATS_BY_DTYPE[dtype if dtype in CPU_DTYPES else torch.float32].element


def data_type(dtype: CacheDtype) -> int:
    """The value of a dtype in DataType (csrc/common/data_type.h)."""
    return values_of("DataType")[f"k{FORMATS_BY_DTYPE[dtype].struct}"]


class MissingKernelError(RuntimeError):
    """A run needs a kernel that was not loaded; the message is the kernel's name in csrc/."""


class InUseError(RuntimeError):
    """Another thread is inside plan or run of the same Attention."""


LIBRARY_ERRORS = (RejectedKernelError, MissingKernelError, InUseError)


def library_path() -> Path:
    """Path of the host library inside the installed package.

    An editable install has two folders: the sources and the build output.

    Raises:
        ImportError: the package was not installed (the library is built by `pip install`).
    """
    for folder in sys.modules[PACKAGE.name].__path__:
        path = Path(folder) / "lib" / "libattn_backend.so"
        if path.exists():
            return path
    if (PACKAGE.parent / "pyproject.toml").exists():
        raise ImportError(
            f"{PACKAGE} is the source tree, which has no built library: run from another folder, or install "
            f"it editable (CONTRIBUTING.md)"
        )
    raise ImportError(
        f"attn_backend is not installed properly: {PACKAGE} has no lib/libattn_backend.so; reinstall it"
    )


@cache
def library() -> Any:
    """The loaded host library, with the functions that csrc/runtime/ exports."""
    for error in LIBRARY_ERRORS:
        tvm_ffi.register_error(error)
    return tvm_ffi.load_module(str(library_path()))


@cache
def names_of(function: str) -> tuple[str, ...]:
    """The argument names of a function, in the library's order."""
    return tuple(str(name) for name in getattr(library(), f"{function}_arguments")())


@cache
def by_name(function: str, last: str | None = None) -> Callable[..., Any]:
    """A function of the library with keyword arguments; missing arguments are None.

    As fast as a direct call.

    last: the last argument that callers pass, in the library's order. Fewer arguments make the call faster.
    """
    names = names_of(function)
    if last is not None:
        names = names[: names.index(last) + 1]
    source = f"lambda *, {', '.join(f'{name}=None' for name in names)}: function({', '.join(names)})"
    made: Callable[..., Any] = eval(source, {"function": getattr(library(), function)})
    made.__name__ = function
    return made


def in_order(function: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function of the library with positional arguments, checked to have these names first. For calls where
    keywords are too slow. Missing arguments are None.

    Raises:
        TypeError: the function's arguments have other names, or another order.
    """
    if names_of(function)[: len(names)] != names:
        raise TypeError(
            f"{function} has the arguments {', '.join(names_of(function))}; got {', '.join(names)}"
        )
    return getattr(library(), function)


@cache
def _dtypes() -> dict[str, numpy.dtype[Any]]:
    dtypes: dict[str, numpy.dtype[Any]] = {}
    for struct, size, fields in library().struct_tables():
        names, formats, offsets = [], [], []
        for name, type_name, count, offset in fields:
            element = dtypes[str(type_name)] if str(type_name) in dtypes else numpy.dtype(str(type_name))
            names.append(str(name))
            formats.append((element, count) if count else element)
            offsets.append(offset)
        dtypes[str(struct)] = numpy.dtype(
            {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}
        )
    return dtypes


@cache
def _enums() -> dict[str, dict[str, int]]:
    enums: dict[str, dict[str, int]] = {}
    for enumeration, name, value in library().enum_values():
        enums.setdefault(str(enumeration), {})[str(name)] = value
    return enums


def dtype_of(struct: str) -> numpy.dtype[Any]:
    """The numpy dtype of a struct in csrc/."""
    return _dtypes()[struct]


def values_of(enumeration: str) -> Mapping[str, int]:
    """The values of an enumeration in csrc/, by name."""
    return _enums()[enumeration]


def pack(struct: str, **fields: object) -> bytes:
    """Packs a struct of csrc/ from its fields, given by name; a nested struct is given as a mapping.

    Raises:
        TypeError: a field is missing or unknown.
        OverflowError: a value does not fit the field's type.
    """
    record = numpy.zeros((), dtype_of(struct))
    _fill(struct, record, fields)
    return record.tobytes()


def unpack(struct: str, data: bytes) -> Any:
    """Unpacks a struct from its bytes: `unpack(...)["field"]`."""
    (record,) = numpy.frombuffer(data, dtype_of(struct))
    return record


def _fill(struct: str, record: Any, fields: Mapping[str, Any]) -> None:
    if fields.keys() != record.dtype.fields.keys():
        raise TypeError(f"{struct} has the fields {', '.join(record.dtype.names)}; got {', '.join(fields)}")
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _fill(f"{struct}.{name}", record[name], value)
            continue
        record[name] = value
        if not numpy.array_equal(record[name], value):
            raise OverflowError(f"{struct}.{name} cannot be {value!r}")


def arch_on(device: torch.device) -> str:
    """The arch whose build serves a CUDA device.

    Raises:
        ValueError: the GPU is older than Ampere, or cannot run ATTN_BACKEND_ARCH.
    """
    return arch_of(torch.cuda.get_device_capability(device))


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kernel_file(name: str, device: torch.device) -> str:
    """Path of the cubin of a kernel in the manifest; "" on a CPU, which has none.

    Raises:
        ValueError: the GPU is older than Ampere, or cannot run ATTN_BACKEND_ARCH.
        RuntimeError: the cubin was not found and cannot be compiled.
    """
    return str(find_kernel(name, arch_on(device))) if device.type == "cuda" else ""
