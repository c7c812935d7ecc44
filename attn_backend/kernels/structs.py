"""Structs and enumerations of csrc/ by their names: NumPy's structured types, made from the tables that the
host library exports (csrc/runtime/structs.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy

from .library import library


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
    """The type of a struct of csrc/."""
    return _dtypes()[struct]


def values_of(enumeration: str) -> Mapping[str, int]:
    """The values of an enumeration of csrc/, by their names there."""
    return _enums()[enumeration]


def pack(struct: str, **fields: object) -> bytes:
    """A struct of csrc/ with these values, each field by its name; those of a struct inside are a mapping.

    Raises:
        TypeError: a field is missing, or there is none of that name.
        OverflowError: a value is not one of the field's type.
    """
    record = numpy.zeros((), dtype_of(struct))
    _fill(struct, record, fields)
    return record.tobytes()


def unpack(struct: str, data: bytes) -> Any:
    """The struct whose bytes these are: `unpack(...)["field"]`."""
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
