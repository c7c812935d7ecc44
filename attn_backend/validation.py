"""Checks the properties in a tensor's handle: type, dtype, dimensions, strides, device.

The checks do not read the tensor's data, so they do not wait for a GPU.

The `..._tensor` functions return their argument, so that a caller can check it and narrow its type in one
step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1
INT32 = (torch.int32,)
INT32_OR_INT64 = (torch.int32, torch.int64)
_STRIDED = torch.strided


def refuse(name: str, value: object, must_be: str) -> NoReturn:
    """Raises ValueError: `name` is `value`, must be `must_be`."""
    raise ValueError(f"{name} is {describe(value)}, must be {must_be}")


def require(holds: object, name: str, value: object, must_be: str) -> None:
    """Refuses an argument unless the condition holds. Not for frequent calls: each one formats must_be."""
    if not holds:
        refuse(name, value, must_be)


def check_types(wanted: type | tuple[type, ...], must_be: str, **arguments: object) -> None:
    """Refuses arguments whose type is not `wanted`, or not one of `wanted`."""
    for name, value in arguments.items():
        if not isinstance(value, wanted):
            refuse(name, value, must_be)


def describe(value: object) -> str:
    """A tensor by the properties in its handle; a string unchanged; anything else by its repr, or by its type
    if the repr is long.
    """
    if not isinstance(value, Tensor):
        try:
            text = repr(value)
        except Exception:  # from a user's __repr__, or an int with too many digits
            return _article(type(value).__name__)
        return (
            text
            if isinstance(value, str) or (len(text) <= 60 and "\n" not in text)
            else _article(type(value).__name__)
        )
    if value.layout is not torch.strided or value.is_nested:
        return f"a {'nested' if value.is_nested else str(value.layout).removeprefix('torch.')} tensor"
    return (
        f"{_article(dtype_name(value.dtype))} tensor of shape {list(value.shape)} and strides "
        f"{list(value.stride())} on {value.device}"
    )


def short_repr(made: Any, **more: object) -> str:
    """repr() of a dataclass that shows tensors by dtype, shape and device. It reads no element, so it neither
    copies nor waits for a GPU.

    more: shown after the fields.
    """
    values = {
        field.name: value
        for field in fields(made)
        if (value := getattr(made, field.name)) is not field.default
    }
    devices = sorted({str(value.device) for value in values.values() if isinstance(value, Tensor)})
    shown = {name: brief(value) for name, value in values.items()} | (
        {"device": ", ".join(devices)} if devices else {}
    )
    return f"{type(made).__name__}({', '.join(f'{name}={text}' for name, text in (shown | more).items())})"


def brief(value: object) -> str:
    return f"{dtype_name(value.dtype)}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiAEI' else 'a'} {noun}"


def check_int(name: str, value: object, least: int, most: int = MAX_INT32) -> int:
    """Refuses anything but an int in [least, most]; True and False are also refused."""
    if type(value) is int and least <= value <= most:
        return value
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else least - 1
    if not least <= number <= most:
        refuse(name, value, f"an int in [{least}, {most}]")
    return number


def check_device(device: object) -> torch.device:
    """Refuses anything but the CPU and the CUDA devices that torch sees."""
    try:
        found = torch.device(device)  # type: ignore[call-overload]
    except (OverflowError, RuntimeError, TypeError, ValueError):
        refuse("device", device, "a CUDA device or the CPU")
    if found.type not in ("cuda", "cpu") or isinstance(device, int):
        refuse("device", str(device), "a CUDA device or the CPU")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        refuse(
            "device",
            str(found),
            f"one of the {count} GPUs that torch sees, or 'cpu'" if count else "'cpu': torch sees no GPU",
        )
    return found


def check_plain(name: str, tensor: object) -> Tensor:
    """Refuses a tensor whose elements are not in memory as its handle describes, or that requires a gradient,
    which is not computed.
    """
    if not isinstance(tensor, Tensor):
        refuse(name, tensor, "a tensor")
    # else `tensor` is a placeholder; the library checks the real tensor when it runs
    if not torch.compiler.is_compiling():
        _check_memory(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} is {describe(tensor)} that requires a gradient, which is not computed; must be "
            f"detached, or used under torch.no_grad()"
        )
    return tensor


def _check_memory(name: str, tensor: Tensor) -> None:
    """Refuses a tensor whose elements are not in memory as its handle describes."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        refuse(name, tensor, "a dense tensor: strided, not quantized, not nested")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(
            f"{name} is {describe(tensor)}, a view whose sign is still to be changed; must be resolved: "
            f"{name}.resolve_neg()"
        )
    if tensor.is_meta or not _has_memory(tensor):
        raise ValueError(f"{name} is {describe(tensor)} without memory behind it, must be a tensor with data")


def check_handle(name: str, tensor: Tensor) -> None:
    """Calls check_plain() if the tensor has a property that its handle hides from the library: a pending
    negation, or a required gradient.
    """
    if tensor.is_neg() or (tensor.requires_grad and torch.is_grad_enabled()):
        check_plain(name, tensor)


def explain_failure(tensors: Iterable[tuple[str, object]]) -> None:
    """Refuses the first tensor that is not plain, or is of a subclass. Called when an error message did not
    name the tensor.
    """
    for name, tensor in tensors:
        if type(check_plain(name, tensor)) not in (Tensor, torch.nn.Parameter):
            raise ValueError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")


def _has_memory(tensor: Tensor) -> bool:
    """Whether the storage holds all of the tensor; false if it was freed or resized."""
    if tensor.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        return (
            tensor.storage_offset() + last + 1
        ) * tensor.element_size() <= tensor.untyped_storage().nbytes()
    except RuntimeError:  # a torch.func tensor, which has no storage
        return False


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def index_tensor(
    name: str, tensor: object, dtypes: tuple[torch.dtype, ...], shape: str, size: int | None = None
) -> Tensor:
    """Refuses anything but a contiguous vector of one of `dtypes` with `size` elements (None: any number).

    `shape`: the shape as docstrings write it.
    """
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype not in dtypes
        or tensor.ndim != 1
        or tensor.layout is not _STRIDED
        or tensor.is_nested
        or not tensor.is_contiguous()
        or (size is not None and tensor.numel() != size)
    ):
        dtype = " or ".join(map(dtype_name, dtypes))
        refuse(name, tensor, f"a contiguous {dtype} tensor {shape}{'' if size is None else f' = [{size}]'}")
    # Attention.plan checks the rest after a failure
    return check_plain(name, tensor) if tensor.is_neg() else tensor


def indptr_tensor(name: str, tensor: object) -> Tensor:
    """Refuses anything but a contiguous int32 or int64 vector [batch + 1]."""
    indptr = index_tensor(name, tensor, INT32_OR_INT64, "[batch + 1]")
    if indptr.numel() == 0:
        refuse(name, tensor, "of at least one element: [batch + 1]")
    return indptr


def table_tensor(name: str, tensor: object, shape: str) -> Tensor:
    """Refuses anything but an int32 matrix with contiguous rows, whose stride may exceed their width."""
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype != torch.int32
        or tensor.ndim != 2
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or (tensor.stride(1) != 1 and tensor.shape[1] > 1)
    ):
        refuse(name, tensor, f"an int32 tensor {shape} with contiguous rows")
    return check_plain(name, tensor) if tensor.is_neg() else tensor  # as in index_tensor()


def check_same_device(name: str, tensor: Tensor, other_name: str, other: torch.device) -> None:
    if tensor.device != other:
        refuse(name, tensor, f"on {other}, where {other_name} is")
