"""Checks of what a tensor's handle tells: type, dtype, dimensions, strides, device. None of them reads the tensor, so they cost nothing on a GPU.

The `..._tensor` functions return their argument, so that a caller checks and narrows its type in one step.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

INT32 = (torch.int32,)
INT32_OR_INT64 = (torch.int32, torch.int64)


def refuse(name: str, value: object, must_be: str) -> NoReturn:
    """Raises ValueError: `name` is `value`, must be `must_be`."""
    raise ValueError(f"{name} is {describe(value)}, must be {must_be}")


def check_types(wanted: type, must_be: str, **arguments: object) -> None:
    """Refuses arguments of another type than `wanted`."""
    for name, value in arguments.items():
        if not isinstance(value, wanted):
            refuse(name, value, must_be)


def describe(value: object) -> str:
    """A tensor by its handle; a string as it is; anything else by its repr, or by its type where that is long."""
    if not isinstance(value, Tensor):
        text = repr(value)
        return text if isinstance(value, str) or (len(text) <= 60 and "\n" not in text) else f"a {type(value).__name__}"
    return f"a {dtype_name(value.dtype)} tensor of shape {list(value.shape)} and strides {list(value.stride())} on {value.device}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def index_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], shape: str, size: int | None = None) -> Tensor:
    """Refuses what is not a contiguous vector of one of `dtypes` with `size` elements (None: any number). `shape` is how the docstrings write its shape."""
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype not in dtypes
        or tensor.ndim != 1
        or not tensor.is_contiguous()
        or (size is not None and tensor.shape[0] != size)
    ):
        dtype = " or ".join(map(dtype_name, dtypes))
        refuse(name, tensor, f"a contiguous {dtype} tensor {shape}{'' if size is None else f' = [{size}]'}")
    return tensor


def indptr_tensor(name: str, tensor: object) -> Tensor:
    """Refuses what is not a contiguous int32 or int64 vector [batch + 1]."""
    indptr = index_tensor(name, tensor, INT32_OR_INT64, "[batch + 1]")
    if indptr.shape[0] == 0:
        refuse(name, tensor, "of at least one element: [batch + 1]")
    return indptr


def table_tensor(name: str, tensor: object, shape: str) -> Tensor:
    """Refuses what is not an int32 matrix whose rows are contiguous (they may lie further apart than they are wide)."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32 or tensor.ndim != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        refuse(name, tensor, f"an int32 tensor {shape} with contiguous rows")
    return tensor


def check_same_device(name: str, tensor: Tensor, other_name: str, other: torch.device) -> None:
    if tensor.device != other:
        refuse(name, tensor, f"on {other}, where {other_name} is")
